"""``extends``, what is said of every key, hints at names, and the defaults that a dry run resolves."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from megatron_dppo.commands.dry_run import resolved_defaults
from megatron_dppo.commands.main import main
from megatron_dppo.config.describe import closest_hint, explain, keys, sections
from megatron_dppo.config.foreign_keys import FOREIGN_KEY_NAMES
from megatron_dppo.config.io import dump_toml, load_config, read_config
from megatron_dppo.config.layout import resolve_layout
from megatron_dppo.config.loss_aliases import LOSS_ALIASES
from megatron_dppo.errors import ConfigError
from tests.unit.test_examples import QWEN3_30B_A3B

CHAIN_SUM = Path(__file__).parents[3] / "examples/chain_sum/dppo.toml"


def test_extends_merges_tables_key_by_key(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/middle.toml").write_text(
        f'extends = "{CHAIN_SUM}"\n[rollout]\nmax_new_tokens = 7\n[data]\neval = {{ a = "task:chain_sum" }}\n'
    )
    top = tmp_path / "top.toml"
    top.write_text('extends = "deep/middle.toml"\n[loss]\nname = "grpo"\n[rollout]\ntop_p = 0.5\n')
    base, result = load_config(CHAIN_SUM), load_config(top, ["--rollout.temperature", "0.5"])
    assert (result.rollout.max_new_tokens, result.rollout.top_p, result.rollout.temperature) == (7, 0.5, 0.5)
    assert result.loss.name == "grpo" and result.data.eval == {"a": "task:chain_sum"}
    assert result.rollout.prompts_per_step == base.rollout.prompts_per_step
    assert result.optimizer == base.optimizer
    assert Path(result.model.path).resolve() == (CHAIN_SUM.parent / "model").resolve()  # beside the base, not beside us
    assert "extends" not in tomllib.loads(dump_toml(result))


def test_extends_rejects_cycles_and_missing_files(tmp_path: Path) -> None:
    a, b = tmp_path / "a.toml", tmp_path / "b.toml"
    a.write_text('extends = "b.toml"\n')
    b.write_text('extends = "a.toml"\n')
    with pytest.raises(ConfigError, match=r"cycle: .*a.toml -> .*b.toml -> .*a.toml"):
        load_config(a)
    a.write_text('extends = "c.toml"\n')
    with pytest.raises(ConfigError, match=r"c.toml' \(which .*a.toml'"):
        load_config(a)
    a.write_text("extends = 3\n")
    with pytest.raises(ConfigError, match="extends = 3"):
        load_config(a)


def test_every_key_section_loss_and_foreign_name_is_explained() -> None:
    for path, field in keys().items():
        assert explain(path).startswith(path)
        assert (field.description or "").replace("``", "").split("\n")[0] in explain(path)
        assert explain("--" + path.rpartition(".")[2].replace("_", "-"))
    for name, _ in sections():
        assert not name or explain(f"[{name}]").startswith(f"[{name}]")
    for alias in LOSS_ALIASES:
        assert LOSS_ALIASES[alias]["name"] in explain(alias)
    assert set(FOREIGN_KEY_NAMES.values()) <= set(keys())
    assert not set(FOREIGN_KEY_NAMES) & {path.rpartition(".")[2] for path in keys()} - {"max_steps"}


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("optimizer.learning_rate", "optimizer.lr"),
        ("loss.max_staleness", "train.max_staleness"),
        ("rollout.num_generations", "rollout.samples_per_prompt"),
        ("trian", "train"),
        ("train.microbatch_tokens", "micro_batch_tokens"),
        ("run.max_staelness", "train.max_staleness"),
    ],
)
def test_a_misspelled_key_suggests_the_right_one(wrong: str, right: str) -> None:
    section, _, key = wrong.rpartition(".")
    flag = f"--{wrong}" if section else f"--{key}.x"
    (problem,) = read_config(CHAIN_SUM, [flag, "1"]).problems
    assert f"did you mean {right!r}?" in problem
    assert closest_hint("completely_else") == ""


def test_help_command_explains_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "verl/dppo_tv"]) == 0 and "dppo_binary_tv" in capsys.readouterr().out
    assert main(["help", "--lr"]) == 0 and "Peak learning rate" in capsys.readouterr().out
    assert main(["help"]) == 0 and "[rollout.servers]" in capsys.readouterr().out
    assert main(["help", "optimiser.lr"]) == 2 and "did you mean 'optimizer.lr'" in capsys.readouterr().err


def test_a_dry_run_prints_resolved_defaults(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["train", str(CHAIN_SUM), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "for 2 process(es), the fewest of this layout" in out and "layout   2 processes" in out
    assert "  loss.divergence_threshold_low = 0.15" in out and "  eval.max_new_tokens = 40" in out
    assert main(["train", str(CHAIN_SUM), "--dry-run", "--world-size", "4"]) == 0
    assert "layout   4 processes" in capsys.readouterr().out


def test_set_keys_and_unused_keys_are_not_resolved() -> None:
    flags = ["--tensor-model-parallel-size", "2", "--expert-model-parallel-size", "1", "--loss.name", "gspo"]
    config = load_config(CHAIN_SUM, [*flags, "--loss.clip_ratio_low", "0.001"])
    result = resolved_defaults(config, resolve_layout(config.parallel, config.batch, 4, QWEN3_30B_A3B))
    assert result["loss.clip_ratio_high"] == 4e-4 and "loss.clip_ratio_low" not in result
    assert "loss.divergence_threshold_low" not in result
    assert result["loss.aggregation"] == "seq_mean_token_mean"
    assert result["parallel.sequence_parallel"] is True and result["parallel.expert_tensor_parallel_size"] == 2

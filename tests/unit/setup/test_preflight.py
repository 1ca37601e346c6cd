"""The dry run: everything that would stop the run, in one message, and nothing touched."""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_dppo import files as disk
from megatron_dppo.commands.main import train_main
from megatron_dppo.config.io import read_config
from megatron_dppo.config.rollout import AgentConfig
from megatron_dppo.config.run import LogConfig
from megatron_dppo.errors import ConfigError, MultipleErrors, UserError
from megatron_dppo.hf.folder import build_hf_model, check_weights_fit, parameter_count, read_hf_config, stream_model
from megatron_dppo.setup import preflight
from megatron_dppo.setup.output_checks import run_bytes
from megatron_dppo.setup.preflight import Start
from megatron_dppo_agents.agent_request import AgentRequest, CallError
from megatron_dppo_agents.template import ChatTemplate
from tests.engines.tiny import byte_tokenizer

EXAMPLE = Path(__file__).parents[3] / "examples/chain_sum"
MODEL = EXAMPLE / "model"
SINGLE = ("--parallel.expert_model_parallel_size", "1")
SGLANG = {"version": "0.5.23", "context_length": 256, "enable_return_routed_experts": True}


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


@pytest.fixture
def dry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Dry-run the example; returns the exit code, what was printed and the message. Nothing may have changed."""
    monkeypatch.chdir(tmp_path)
    for name in ("WORLD_SIZE", "RANK", "WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)

    def run(*overrides: str, config: Path = EXAMPLE / "dppo.toml") -> tuple[int, str, str]:
        before = tree(tmp_path)
        code = train_main([str(config), "--dry-run", "--run.output_dir", "run", *overrides])
        assert tree(tmp_path) == before, "a dry run creates and changes nothing"
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def bullets(message: str) -> list[str]:
    return [line.removeprefix("  - ") for line in message.splitlines() if line.startswith("  - ")]


def test_one_message_has_all_problems(dry: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "label": "\\ud800"}\n')
    code, out, error = dry(
        *("--run.num_stepz", "3"),  # unknown key
        *("--recompute-granularty", "full"),  # misspelt field of Megatron's
        *("--recompute-num-layers", "one"),  # of another type
        *("--run.output_dir", "file"),
        *("--reward.function", "nowhere:reward"),
        *("--data.train", "rows.jsonl"),
        *("--data.eval", "absent.jsonl"),
        *("--log.wandb_project", "mine"),
        *("--rollout.engine", "sglang", "--rollout.servers.urls", '["http://127.0.0.1:9"]'),
        *("--world-size", "3"),
        "stray",
    )
    assert code == 2 and error.startswith("\nerror: 10 problems") and "Traceback" not in error
    expected = [
        "unexpected argument 'stray'",
        "run.num_stepz = 3: unknown key; did you mean 'num_steps'?",
        "this layout cannot run:",
        "rows.jsonl:1: field 'label' holds half of a UTF-16 pair",
        "data file 'absent.jsonl' does not exist",
        "reward.function = 'nowhere:reward' cannot be imported",
        "model.transformer.recompute_granularty = 'full': Megatron's TransformerConfig has no such field; did you mean "
        "'recompute_granularity'?",
        "model.transformer.recompute_num_layers = 'one': expected int",
        "log.wandb_project = 'mine'",
        "run.output_dir = 'file'",
    ]
    found = bullets(error)
    assert len(found) == len(expected)
    for text in expected:
        assert any(line.startswith(text) for line in found), (text, found)
    # Layout and arithmetic need none of these, and a server that is not running yet is a note.
    assert "layout   3 processes" in out and "16 prompts x 16 samples = 256 samples a step" in out
    assert "servers  1 of 1 not running yet (http://127.0.0.1:9); megatron-dppo serve" in out


def test_checks_that_depend_on_an_invalid_value_are_skipped(dry: Any) -> None:
    options = ("--rollout.max_new_tokens", "many", "--optimizer.lr", "-1", "--recompute-granularty", "full", *SINGLE)
    code, out, error = dry(*options)
    assert code == 2
    assert [line.split(":")[0].split(" = ")[0] for line in bullets(error)] == [
        "rollout.max_new_tokens",
        "optimizer.lr",
        "model.transformer.recompute_granularty",
    ]
    assert "not checked" in out and "model and data" in out and "servers" in out


def test_the_other_sections_are_checked_if_one_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('[run]\nnum_steps = 2\n[model]\npath = "m"\ndtype = "fp32"\n')
    found = read_config(path, ["--loss.name", "grpo"])
    assert found.problems == [
        "run.output_dir is missing; it has no default",
        "data is missing; it has no default",
        "rollout is missing; it has no default",
        "optimizer is missing; it has no default",
    ]
    assert found.config is not None and found.config.loss.name == "grpo" and found.config.run.num_steps == 2
    assert found.unreliable_sections == {"run", "data", "rollout", "optimizer"}


def test_the_layout_of_a_larger_run_is_checked_on_one_process(dry: Any) -> None:
    assert dry("--world-size", "2")[0] == 0
    code, _, error = dry("--world-size", "1")
    assert code == 2 and "1 * 2 * 1 = 2" in error and "1 processes" in error
    assert "at least 1" in dry("--world-size", "0")[2]
    assert train_main([str(EXAMPLE / "dppo.toml"), "--world-size", "2"]) == 2, "only for --dry-run"


def test_the_run_and_the_dry_run_have_the_same_checks(
    dry: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def find(start: Start) -> list[UserError]:
        return [ConfigError("the moon is full")]

    monkeypatch.setattr(preflight, "CHECKS", [*preflight.CHECKS, preflight.PreflightCheck("moon", frozenset(), find)])
    assert dry(*SINGLE)[2] == "\nerror: the moon is full\n"
    assert train_main([str(EXAMPLE / "dppo.toml"), "--run.output_dir", str(tmp_path / "run"), *SINGLE]) == 2
    assert not (tmp_path / "run").exists()


def test_an_error_of_megatron_is_reported_like_other_problems(dry: Any) -> None:
    code, _, error = dry("--recompute-granularity", "full", "--recompute-method", "uniform", *SINGLE)
    assert code == 2 and "Megatron's TransformerConfig rejects" in error and "recompute_num_layers" in error
    code, _, error = dry("--model.transformer.activation_func_clamp_value", "true", *SINGLE)
    assert code == 2 and "expected float" in error
    code, _, error = dry("--model.transformer.init_method", "normal", *SINGLE)
    assert code == 2 and "which a configuration file cannot hold" in error


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's model with weights in two files."""
    folder = tmp_path_factory.mktemp("model") / "m"
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = dict(stream_model(build_hf_model(read_hf_config(MODEL), torch.float32, seed=0)))
    names = list(tensors)
    parts = {"a.safetensors": names[: len(names) // 2], "b.safetensors": names[len(names) // 2 :]}
    for file, part in parts.items():
        save_file({name: tensors[name].contiguous() for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def cut_off(folder: Path) -> None:
    file = folder / "b.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def lose_file(folder: Path) -> None:
    (folder / "b.safetensors").unlink()


def lose_weight(folder: Path) -> None:
    tensors = load_file(folder / "b.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "b.safetensors")
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    del weight_map["model.norm.weight"]
    index.write_text(json.dumps({"weight_map": weight_map}))


def other_shape(folder: Path) -> None:
    tensors = load_file(folder / "b.safetensors")
    save_file(tensors | {"model.norm.weight": torch.ones(3)}, folder / "b.safetensors")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut_off, "b.safetensors is not a readable safetensors file"),
        (lose_file, "names b.safetensors (2 files in all), which is not there"),
        (
            lose_weight,
            "do not fit config.json: model.norm.weight is missing (1 missing, 0 of other shapes or dtypes, 0",
        ),
        (other_shape, "model.norm.weight has shape (3,) in F32, expected (64,)"),
    ],
)
def test_incomplete_weights_are_detected_from_their_headers(
    dry: Any, weights: Path, tmp_path: Path, damage: Any, words: str
) -> None:
    folder = tmp_path / "m"
    shutil.copytree(weights, folder)
    check_weights_fit(folder, read_hf_config(folder))
    damage(folder)
    code, _, error = dry("--model.path", "m", *SINGLE)
    assert code == 2 and words in error and "problems" not in error


def test_the_parameters_are_counted_without_allocating_them() -> None:
    model = build_hf_model(read_hf_config(MODEL), torch.float32)
    assert parameter_count(read_hf_config(MODEL)) == sum(p.numel() for p in model.parameters())


def test_a_disk_that_is_too_small_for_the_run_is_reported(dry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "free_bytes", lambda path: 3_000_000)
    code, _, error = dry(*SINGLE)
    assert code == 2 and "the run needs about" in error and "3.0 MB free" in error


def test_an_output_folder_below_a_file_is_reported(dry: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    assert "is a file" in dry("--run.output_dir", "file/deeper/run", *SINGLE)[2]
    servers = ("--rollout.engine", "sglang", "--rollout.servers.urls", '["http://127.0.0.1:9"]')
    disk_sync = ("--rollout.weight_sync.method", "disk", "--rollout.weight_sync.folder", "file/weights")
    weights = dry(*servers, *disk_sync, *SINGLE)[2]
    assert "rollout.weight_sync.folder = 'file/weights': " in weights and "is a file" in weights


def test_the_space_of_a_run_includes_recorded_rollouts_which_need_pyarrow(
    dry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs: Any = SimpleNamespace(num_parameters=1000, hf_config=read_hf_config(MODEL))
    overrides = ["--run.output_dir", "run", "--run.num_steps", "10", "--rollout.max_new_tokens", "100"]
    without = read_config(EXAMPLE / "dppo.toml", overrides).config
    config = read_config(EXAMPLE / "dppo.toml", [*overrides, "--log.rollouts_every", "3"]).config
    assert config is not None and without is not None
    # Steps 3, 6 and 9; 256 samples of 1 kB and 100 tokens of 17 bytes.
    assert run_bytes(config, inputs) - run_bytes(without, inputs) == 3 * 256 * (1000 + 1700)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    code, _, error = dry("--log.rollouts_every", "3", *SINGLE)
    assert code == 2 and "log.rollouts_every = 3 needs the package pyarrow: pip install" in error


def test_an_unwritable_output_folder_is_reported(dry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_dppo.setup.output_checks.os.access", lambda *_: False)  # root may write everywhere
    code, _, error = dry(*SINGLE)
    assert code == 2 and "run.output_dir = 'run': " in error and "cannot be written (no permission" in error


def test_a_run_with_wandb_needs_its_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from megatron_dppo.report import sinks

    monkeypatch.setattr(sinks, "require_wandb", lambda project: object())
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="has no API key"):
        sinks.require_sinks(LogConfig(tensorboard=False, wandb_project="mine"))
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    sinks.require_sinks(LogConfig(tensorboard=False, wandb_project="mine"))
    (tmp_path / "netrc").unlink()
    monkeypatch.setenv("WANDB_MODE", "offline")
    sinks.require_sinks(LogConfig(tensorboard=False, wandb_project="mine"))
    monkeypatch.setattr(sinks.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="package tensorboard"):
        sinks.require_sinks(LogConfig())


def test_several_errors_are_one_error_without_repeated_parts() -> None:
    from megatron_dppo.errors import ErrorCollector

    problems = ErrorCollector()
    problems.add(MultipleErrors([ConfigError("a"), ConfigError("b\nc")]))
    problems.add(ConfigError("a"))
    with pytest.raises(MultipleErrors) as raised:
        problems.raise_if_any()
    assert str(raised.value).splitlines()[1:] == ["  - a", "  - b", "    c"] and raised.value.exit_code == 2


# As DeepSeek-R1's and the first V3's do: calls and their results are written, the tools are not.
WRITES_CALLS_ALONE = """{{ bos_token }}{% for message in messages %}
{%- if message.role == "user" %}<｜User｜>{{ message.content }}{% endif %}
{%- if message.role == "assistant" %}<｜Assistant｜>{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}<｜tool▁calls▁begin｜>{{ call.function.name }}{% endfor %}{% endif %}
{%- if message.role == "tool" %}<｜tool▁output▁begin｜>{{ message.content }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"""
IF_ASKED = "{% if with_tools is defined %}{{ tools | tojson }}{% endif %}" + WRITES_CALLS_ALONE


@pytest.mark.parametrize(
    ("template", "variables", "is_refused"),
    [
        (WRITES_CALLS_ALONE, {}, True),
        ("{{ tools | tojson }}" + WRITES_CALLS_ALONE, {}, False),
        (IF_ASKED, {}, True),
        (IF_ASKED, {"with_tools": True}, False),
        (None, {}, False),
    ],
    ids=["calls alone", "tools", "variable not set", "variable set", "no template"],
)
def test_an_agent_whose_template_writes_no_tools_is_warned_before_its_first_call(
    template: str | None, variables: dict[str, Any], is_refused: bool
) -> None:
    config: Any = SimpleNamespace(
        agent=AgentConfig(function="agent.py:run"), data=SimpleNamespace(chat_template_kwargs=variables)
    )
    tokenizer = byte_tokenizer(["<pad>", "<s>", "</s>"])
    tokenizer.chat_template = template
    model: Any = SimpleNamespace(tokenizer=tokenizer)
    start = Start(config, 1, model=model)
    (check,) = (check for check in preflight.CHECKS if check.name == "agent format")
    assert not list(check.find(start))
    warnings = [note for note in start.notes if note.startswith("warning") and "does not write tools" in note]
    assert len(warnings) == is_refused
    call = AgentRequest(model="", is_chat=True, tools=({"type": "function", "function": {}},))
    # The warning and the error of the first call agree.
    with pytest.raises(CallError) if is_refused else nullcontext():
        ChatTemplate(tokenizer, variables).check_tools(call)

"""The section ``[data]`` as a run sees it: several sources, named held-out sets, and what is said about them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from columns import ids
from megatron_dppo.commands.main import train_main
from megatron_dppo.config.io import dump_toml, load_config
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import ConfigError, DataError
from megatron_dppo.report.metrics import reduce_metrics
from megatron_dppo.run import evaluation
from megatron_dppo.setup.inputs import Inputs, read_inputs
from megatron_dppo.source_names import name_sources
from megatron_dppo.types import Completion, Metric, PromptLimits, Rollout, RolloutGroup
from tests.unit.configs import config
from tests.unit.data_files import LAYOUTS, write_jsonl, write_parquet

SINGLE = ["--parallel.expert_model_parallel_size", "1"]
EXAMPLE = Path(__file__).parents[3] / "examples/chain_sum"


def example(tmp_path: Path, data: str) -> Config:
    """The embedded example with another ``[data]`` section, in a file of its own folder."""
    text = (EXAMPLE / "dppo.toml").read_text()
    head, _, rest = text.partition("[data]\n")
    rest = rest[rest.index("\n[") :]
    (tmp_path / "run.toml").write_text(f"{head}[data]\n{data}\n{rest}".replace('"model"', f'"{EXAMPLE / "model"}"'))
    return load_config(tmp_path / "run.toml", SINGLE)


def inputs(tmp_path: Path, data: str) -> Inputs:
    return read_inputs(example(tmp_path, data), 1)


def test_sources_next_to_the_configuration_are_resolved_in_lists_and_tables(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", LAYOUTS["slime text"])
    found = example(
        tmp_path,
        'train = ["a.jsonl", "hf:a/b"]\n[data.eval]\nsums = "a.jsonl"\nt = "task:chain_sum"',
    ).data
    assert found.train == [str(tmp_path / "a.jsonl"), "hf:a/b"]
    assert found.eval == {"sums": str(tmp_path / "a.jsonl"), "t": "task:chain_sum"}
    again = tmp_path / "again.toml"
    again.write_text(dump_toml(example(tmp_path, 'train = ["a.jsonl"]\neval.sums = "a.jsonl"')))
    assert load_config(again).data.eval == {"sums": str(tmp_path / "a.jsonl")}


@pytest.mark.parametrize(
    ("data", "part"),
    [
        ({"train": []}, "expected at least"),
        ({"train": ""}, "data.train = '': the path"),
        ({"eval": {}}, "remove data.eval"),
        ({"eval": {"a/b": "x.jsonl"}}, "'a/b' becomes part"),
        ({"overlong_prompts": "cut"}, "'error', 'drop' or 'truncate_left'"),
    ],
)
def test_invalid_values_of_the_data_section_are_rejected(data: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(data={"train": "task:chain_sum", **data})
    assert part in str(error.value)


def test_the_summary_counts_read_dropped_and_remaining_rows(tmp_path: Path) -> None:
    rows = LAYOUTS["slime text"]
    write_jsonl(tmp_path / "a.jsonl", [*rows, *rows, {**rows[0], "prompt": "1+" * 30 + "1="}])
    write_parquet(tmp_path / "b.parquet", [{"question": "5+5=", "answer": "10"}])
    found = inputs(
        tmp_path,
        'train = ["a.jsonl", "b.parquet"]\nmax_prompt_tokens = 20\noverlong_prompts = "drop"\n'
        '[data.eval]\nsums = "task:chain_sum"\nmore = "b.parquet"',
    )
    train, first, second = found.data_summary.split("\n")
    assert train.startswith("data     train: 5 prompts, 4 repeated rows dropped, 1 too long dropped; from ")
    assert train.endswith("b.parquet (10 rows)")
    assert first.startswith("data     eval sums: ") and "; from task:chain_sum" in first
    assert second.startswith("data     eval more: 1 prompts; from ")
    assert list(found.eval_prompts) == ["sums", "more"] and len(found.train_prompts) == 5


def test_prompts_have_the_limits_of_their_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1+1=", "label": "2"}, {"prompt": "1+2=", "label": "3"}])
    write_jsonl(tmp_path / "b.jsonl", [{"prompt": "2+2=", "label": "4"}, {"prompt": "1+1=", "label": "2"}])
    data = 'train = ["a.jsonl", "b.jsonl"]\neval = "b.jsonl"\n[data.sources."b.jsonl"]\nmax_new_tokens = 3'
    found = inputs(tmp_path, data)
    limits = {found.train_prompts[i].text: found.train_prompts[i].limits for i in range(3)}
    # The second 1+1= is a duplicate of a row of a.jsonl, which has no limits.
    assert limits == {"1+1=": None, "1+2=": None, "2+2=": PromptLimits(source="b.jsonl", max_new_tokens=3)}
    assert found.eval_prompts[""][0].limits is None
    again = tmp_path / "again.toml"
    again.write_text(dump_toml(load_config(tmp_path / "run.toml", SINGLE)))
    assert load_config(again).data.sources["b.jsonl"].max_new_tokens == 3
    assert train_main([str(tmp_path / "run.toml"), "--dry-run", *SINGLE]) == 0
    assert "\ndata     limits of b.jsonl: max_new_tokens = 3\n" in capsys.readouterr().out


def test_weights_make_a_mix_that_the_dry_run_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three quarters of 50 steps of 16 prompts: 600 of two rows and 200 of three, with one duplicate."""
    from megatron_dppo.setup.resume import run_identity

    write_jsonl(tmp_path / "a.jsonl", [{"prompt": f"{i}+1=", "label": str(i + 1)} for i in (1, 2)])
    write_jsonl(tmp_path / "b.jsonl", [{"prompt": f"{i}+1=", "label": str(i + 1)} for i in (2, 3, 4, 5)])
    data = 'train = ["a.jsonl", "b.jsonl"]\n[data.sources]\n"b.jsonl" = {weight = 0.25}\n"a.jsonl" = {weight = 0.75}'
    mixed = example(tmp_path, data)
    read = read_inputs(mixed, 1)
    assert [read.train_prompts[i].prompt_id.partition(":")[0] for i in range(4)].count("a.jsonl") == 3
    changes = ["--run.num_steps", "50", "--rollout.prompts_per_step", "16"]
    assert train_main([str(tmp_path / "run.toml"), "--dry-run", *SINGLE, *changes]) == 0
    printed = capsys.readouterr().out
    assert "\ndata     shares of the prompts: 0.75 from a.jsonl, 0.25 from b.jsonl\n" in printed
    passes = "600 from a.jsonl (300 passes over 2), 200 from b.jsonl (66.7 passes over 3)"
    assert f"\nepochs   50 steps x 16 prompts = 800 prompts = {passes}; " in printed
    other = example(tmp_path, data.replace("0.25", "0.5"))
    identities = [run_identity(each.lora, each.run.seed, read_inputs(each, 1)) for each in (mixed, other)]
    assert identities[0]["prompts"] != identities[1]["prompts"], "a checkpoint of the one cannot continue the other"
    write_jsonl(tmp_path / "b.jsonl", [{"prompt": "2+1=", "label": "3"}])
    assert train_main([str(tmp_path / "run.toml"), "--dry-run", *SINGLE]) == 2
    assert 'data.sources."b.jsonl" has a weight, but no prompt' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("limits", "others", "part"),
    [
        ({"b.json": {}}, {}, "data.sources has 'b.json'"),
        ({"z": {}}, {}, "its sources are 'a.jsonl', 'b.jsonl'"),
        ({"b.jsonl": {"max_call": 3}}, {}, "data.sources.b.jsonl.max_call = 3: unknown key; did"),
        ({"b.jsonl": {"temperature": 0.5}}, {}, "the loss divides"),
        ({"b.jsonl": {"top_p": 0.5}}, {}, "top_p cannot differ"),
        ({"b.jsonl": {"weight": 0.0}}, {}, "greater than 0"),
        ({"b.jsonl": {"weight": -1.0}}, {}, "greater than 0"),
        ({"b.jsonl": {"weight": float("nan")}}, {}, "data.sources.b.jsonl.weight"),
        ({"b.jsonl": {"weight": float("inf")}}, {}, "data.sources.b.jsonl.weight"),
        ({"b.jsonl": {"weight": 1.0}}, {}, "data.sources.\"b.jsonl\" has a weight and 'a.jsonl'"),
        ({"b.jsonl": {"weight": 1.0}, "a.jsonl": {}}, {}, 'set data.sources."a.jsonl".weight'),
        ({"b.jsonl": {"max_calls": 3}}, {}, 'data.sources."b.jsonl".max_calls has no effect'),
        ({"b.jsonl": {"max_new_tokens": 99_999}}, {}, "is above rollout.max_new_tokens"),
        ({"b.jsonl": {"max_new_tokens": 4}}, {"reward": {"overlong_buffer_tokens": 4}}, "otherwise every response"),
    ],
)
def test_limits_that_cannot_apply_are_rejected(limits: dict[str, Any], others: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(data={"train": ["x/a.jsonl", "x/b.jsonl"], "sources": limits}, **others)
    assert part in str(error.value)


def test_prompts_have_the_name_of_their_source(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", LAYOUTS["slime text"])
    data = inputs(tmp_path, 'train = ["a.jsonl", "task:chain_sum"]\neval = "task:chain_sum"')
    assert {prompt.source for prompt in data.train_prompts} == {"a.jsonl", "task:chain_sum"}
    assert {prompt.source for prompt in data.eval_prompts[""]} == {"task:chain_sum"}


def test_sources_with_one_metric_name_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"rollout/source/a_1\.jsonl"):
        config(data={"train": ["x/a 1.jsonl", "x/a_1.jsonl"], "sources": {"a 1.jsonl": {}, "a_1.jsonl": {}}})


def test_rows_of_files_of_one_name_have_different_names(tmp_path: Path) -> None:
    """Rows of training and validation, of which each folder has a file ``rows.jsonl``."""
    paths = [tmp_path / folder / "rows.jsonl" for folder in ("gsm8k", "math/a", "math/b")]
    for path, rows in zip(paths, ([0], [1], [2]), strict=True):
        path.parent.mkdir(parents=True)
        write_jsonl(path, [LAYOUTS["slime text"][i] for i in rows])
    train, held_out = [str(path) for path in paths[:2]], str(paths[2])
    example(tmp_path, f'train = {train}\neval = "{held_out}"')
    data = read_inputs(load_config(tmp_path / "run.toml", SINGLE), 1)
    names = [prompt.prompt_id for prompt in (*data.train_prompts, *data.eval_prompts[""])]
    assert names == ["gsm8k/rows.jsonl:1", "a/rows.jsonl:1", "b/rows.jsonl:1"]
    # The same in a message that stops a run.
    write_jsonl(paths[1], [{**LAYOUTS["slime text"][0], "label": "another"}])
    with pytest.raises(DataError, match=r"^a/rows\.jsonl:1: the label .* contradicts gsm8k/rows\.jsonl:1, "):
        inputs(tmp_path, f"train = {train}\neval = '{held_out}'")


def test_a_source_that_is_listed_twice_is_refused() -> None:
    for train in (["task:chain_sum", "task:chain_sum"], ["a.jsonl", "b.jsonl", "./a.jsonl"]):
        with pytest.raises(ConfigError, match=r"'(task:chain_sum|a\.jsonl)'"):
            config(data={"train": train})


def test_shares_and_reward_functions_name_files_of_one_name_by_their_folders() -> None:
    data = {
        "train": ["x/a.jsonl", "y/a.jsonl"],
        "eval": {"z": "z/a.jsonl", "again": "x/a.jsonl"},
        "sources": {"x/a.jsonl": {"weight": 1}, "y/a.jsonl": {"weight": 3}},
    }
    functions = {"a": {"function": "r.py:a", "sources": ["y/a.jsonl", "z/a.jsonl"]}, "b": {"function": "r.py:b"}}
    made = config(data=data, reward={"functions": functions})
    assert made.data.weights == {"x/a.jsonl": 1, "y/a.jsonl": 3}
    with pytest.raises(ConfigError, match=r"'x/a\.jsonl' or 'y/a\.jsonl'\?"):
        config(data=data | {"sources": {"a.jsonl": {}}})
    functions["a"]["sources"] = ["a.jsonl"]
    with pytest.raises(ConfigError, match=r"they are 'x/a\.jsonl', 'y/a\.jsonl', 'z/a\.jsonl'"):
        config(data=data, reward={"functions": functions})


@pytest.mark.parametrize("seed", range(20))
def test_names_of_sources_differ_and_are_the_shortest_that_do(seed: int) -> None:
    rng = random.Random(seed)
    paths = {"/" * rng.choice([0, 1]) + "/".join(rng.choices("ab", k=rng.randint(1, 4))) for _ in range(9)}
    named = name_sources([*paths, "hf:a/b", "task:a"])
    assert len({*named.values()}) == len(paths) + 2
    for path in paths:
        name, parts = named[path], Path(path).parts
        assert Path(name).parts == parts[-len(Path(name).parts) :], "an ending of the path"
        shorter = "/".join(Path(name).parts[1:])
        assert not shorter or [other for other in paths - {path} if f"/{other}".endswith(f"/{shorter}")]


def test_the_dry_run_prints_the_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example(tmp_path, 'train = "task:chain_sum"')
    assert train_main([str(tmp_path / "run.toml"), "--dry-run", *SINGLE]) == 0
    assert "data     train: 2626 prompts; from task:chain_sum (2626 rows)" in capsys.readouterr().out


def test_each_process_of_a_dry_run_reads_the_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jsonl(tmp_path / "a.jsonl", [*LAYOUTS["slime text"], {"prompt": "1+1="}])
    example(tmp_path, 'train = "a.jsonl"')
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert train_main([str(tmp_path / "run.toml"), "--dry-run", *SINGLE]) == 2
    write_jsonl(tmp_path / "a.jsonl", LAYOUTS["slime text"])
    assert train_main([str(tmp_path / "run.toml"), "--dry-run", *SINGLE]) == 0
    assert capsys.readouterr() == ("", ""), "rank 0 speaks for all"


def test_named_sets_are_reported_separately_and_combined(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two ranks share both sets; the answer of each prompt is right when a coin of its own says so."""
    write_jsonl(tmp_path / "a.jsonl", LAYOUTS["slime text"])
    write_jsonl(tmp_path / "b.jsonl", [{"problem": f"{i}+1=", "answer": i + 1} for i in range(2, 9)])
    configuration = example(tmp_path, 'train = "a.jsonl"\n[data.eval]\na = "a.jsonl"\nb = "b.jsonl"')
    read = read_inputs(configuration, 1)
    texts = {name: [s[i].text for i in range(len(s))] for name, s in read.eval_prompts.items()}
    reward = {text: float(random.Random(text).random() < 0.5) for text in texts["a"] + texts["b"]}
    local: list[dict[str, Metric]] = []

    def answer(prompts: Any, *rest: Any) -> list[RolloutGroup]:
        done = Completion(token_ids=ids([1]), logprobs=None, finish_reason="stop", policy_version=0, text="")
        return [
            RolloutGroup(prompt=p, rollouts=(Rollout(prompt=p, completion=done, reward=reward[p.text]),))
            for p in prompts
        ]

    stream = SimpleNamespace(submit=answer, wait_for=lambda groups, clock: groups)
    monkeypatch.setattr(evaluation, "write_sample_responses", lambda *_: None)
    monkeypatch.setattr(evaluation, "reduce_over_samples", lambda _, metrics: local.append(metrics) or {})
    for rank in (0, 1):
        groups = SimpleNamespace(world=None)
        evaluator = evaluation.Evaluator(configuration, read.eval_prompts, stream, groups, 2, rank, Mock())  # type: ignore[arg-type]
        evaluator.evaluate(1)
    values = reduce_metrics(local, None)
    assert values["a/accuracy"] == sum(reward[t] for t in texts["a"]) / 4
    assert values["b/accuracy"] == sum(reward[t] for t in texts["b"]) / 7
    assert values["accuracy"] == sum(reward[t] for t in texts["a"] + texts["b"]) / 11
    assert set(values) == {f"{name}{metric}" for name in ("", "a/", "b/") for metric in ("accuracy", "response_length")}


def test_a_set_without_a_name_is_reported_once(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", LAYOUTS["slime text"])
    assert list(inputs(tmp_path, 'train = "a.jsonl"\neval = "a.jsonl"').eval_prompts) == [""]
    assert inputs(tmp_path, 'train = "a.jsonl"').eval_prompts == {}


def test_a_mixed_file_is_rejected_before_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [LAYOUTS["slime text"][0], LAYOUTS["aime25 of math-ai"][1]]
    write_jsonl(tmp_path / "a.jsonl", rows)
    example(tmp_path, 'train = "a.jsonl"')
    assert train_main([str(tmp_path / "run.toml"), "--dry-run", *SINGLE]) == 2
    assert "a.jsonl:2: this row looks like problem (text) + answer" in capsys.readouterr().err


def test_a_checkpoint_must_have_the_same_prompts_and_labels_in_a_file_of_any_name(tmp_path: Path) -> None:
    from megatron_dppo.setup.resume import run_identity

    identities = []
    for label, file in (("2", "a.jsonl"), ("2", "other/b.jsonl"), ("3", "a.jsonl")):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        write_jsonl(tmp_path / file, [{**LAYOUTS["slime text"][0], "label": label}])
        configuration = example(tmp_path, f'train = ["{file}"]')
        identities.append(run_identity(configuration.lora, configuration.run.seed, read_inputs(configuration, 1)))
    assert identities[0] == identities[1] == json.loads(json.dumps(identities[0]))
    assert identities[0]["prompts"] != identities[2]["prompts"]

"""Before the start: what one rank finds stops all of them, and the data that rank 0 has read are everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_dppo.config.io import load_config
from megatron_dppo.config.schema import Config
from megatron_dppo.data import sources
from megatron_dppo.errors import ConfigError, DataError, MultipleErrors, UserError
from megatron_dppo.setup import preflight
from megatron_dppo.setup.inputs import Inputs, read_inputs
from megatron_dppo.setup.preflight import Start, find_problems, require_inputs
from tests.distributed.collectives import recorded_collectives
from tests.distributed.spawn import run_distributed
from tests.unit.data_files import write_jsonl

pytestmark = pytest.mark.distributed

EXAMPLE = Path(__file__).parents[2] / "examples/chain_sum/dppo.toml"
NESTED = {"none": None, "float": 1e-300, "big": 10**30, "é": ["\U0001f600", {"yes": True, "one": 1}], "empty": {}}
ROWS = [{"prompt": f"{i}+1=", "label": i + 1, "level": i, **(NESTED if i % 2 else {})} for i in range(40)]


def config_of(folder: Path, rank: int, **overrides: Any) -> Config:
    """The embedded example on files that are there for rank 0 alone."""
    here = folder / ("data" if rank == 0 else f"not here: rank {rank}")
    values = {
        "run.output_dir": folder / "run",
        "data.train": here / "train.jsonl",
        "data.eval": f'{{ sums = "{here / "eval.jsonl"}", all = "task:chain_sum" }}',
        "data.max_prompt_tokens": 40,
        "data.overlong_prompts": "drop",
        "parallel.expert_model_parallel_size": 1,
        **overrides,
    }
    return load_config(EXAMPLE, [part for key, value in values.items() for part in (f"--{key}", str(value))])


def started(config: Config, rank: int) -> Inputs:
    start = Start(config, 2, rank)
    errors = find_problems(start)
    return require_inputs(start, errors, dist.group.WORLD)


def content(inputs: Inputs) -> dict[str, Any]:
    """All that a rank may ask of its data."""
    sets = {"train": inputs.train_prompts, **inputs.eval_prompts}
    return {
        "prompts": {name: [repr(data[i]) for i in range(2 * len(data))] for name, data in sets.items()},
        "facts": {name: (data.fingerprint(), data.num_dropped, data.longest, len(data)) for name, data in sets.items()},
        "summary": inputs.data_summary,
    }


def check_sharing(rank: int, folder: Path) -> None:
    """Rank 1 opens no data file, and has the data that a process alone reads."""
    if rank != 0:
        sources.open_source = None  # type: ignore[assignment]
    config = config_of(folder, rank)
    with recorded_collectives() as calls:
        inputs = started(config, rank)
    assert all("broadcast" in name or "all_gather" in name for name, _ in calls)
    expected: list[Any] = [None]
    if rank == 0:
        expected = [content(read_inputs(config, 2))]
    dist.broadcast_object_list(expected, src=0)
    result = content(inputs)
    assert result == expected[0]
    assert result["facts"]["train"][1] == 1 and len(result["prompts"]["sums"]) == 2 * 2


def check_bad_row(rank: int, folder: Path) -> None:
    """Every rank reports what only rank 0 can see, in the words of one process."""
    rows = (folder / "data/train.jsonl").read_text().splitlines()
    rows[6] = '{"prompt": "1+1=", "label": "\\ud800"}'
    if rank == 0:
        (folder / "data/bad.jsonl").write_text("\n".join(rows))
        (folder / "data/worse.jsonl").write_text('{"prompt": "1+1="}\n')
        with pytest.raises(UserError) as alone:
            read_inputs(config_of(folder, 0, **bad(folder)), 2)
        words = [str(alone.value)]
    else:
        words = [""]
    dist.broadcast_object_list(words, src=0)
    with pytest.raises(MultipleErrors) as raised:
        started(config_of(folder, rank, **bad(folder)), rank)
    assert str(raised.value) == words[0] and raised.value.on_every_rank and raised.value.exit_code == 2
    first, second = raised.value.errors
    assert str(first).startswith("bad.jsonl:7: field 'label' holds half of a UTF-16 pair")
    assert str(second).startswith("worse.jsonl:1: field 'label' is missing")
    # One of them alone, and beside it what another rank finds of its own.
    with pytest.raises(UserError, match=r"^bad\.jsonl:7: ") as one:
        started(config_of(folder, rank, **{"data.train": folder / "data/bad.jsonl"}), rank)
    assert type(one.value) is (DataError if rank == 0 else ConfigError) and one.value.on_every_rank
    path = Path(__file__).parents[2] / "examples/chain_sum/model" if rank == 0 else folder / "no model"
    with pytest.raises(MultipleErrors) as both:
        started(config_of(folder, rank, **{"data.train": folder / "data/bad.jsonl", "model.path": path}), rank)
    assert [str(e)[:12] for e in both.value.errors[:2]] == ["bad.jsonl:7:", "[rank 1] mod"]


def bad(folder: Path) -> dict[str, Path]:
    return {"data.train": folder / "data/bad.jsonl", "data.eval": folder / "data/worse.jsonl"}


def check_errors(rank: int) -> None:
    start, group = Start(None, 2, rank), dist.group.WORLD  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"\[rank 1\] the model") as one:
        require_inputs(start, [ConfigError("the model is not here")] if rank == 1 else [], group)
    assert one.value.on_every_rank
    with pytest.raises(ConfigError, match=r"^both$"):
        require_inputs(start, [ConfigError("both")], group)
    alone = {0: "the folder is a file", 1: "the model is not here"}
    with pytest.raises(MultipleErrors) as several:
        require_inputs(start, [ConfigError("both"), ConfigError(alone[rank])], group)
    assert [str(e) for e in several.value.errors] == ["both", alone[0], f"[rank 1] {alone[1]}"]


def check(rank: int, world_size: int, folder: Path) -> None:
    preflight.CHECKS = preflight.CHECKS[:1]  # the others read no data
    check_errors(rank)
    check_sharing(rank, folder)
    check_bad_row(rank, folder)


def test_every_rank_raises_what_any_of_them_found_and_has_the_data_of_rank_0(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    long = {"prompt": "1+" * 40 + "1=", "label": 41}
    write_jsonl(data / "train.jsonl", [*ROWS, long])
    write_jsonl(data / "eval.jsonl", [{"prompt": "7+7=", "label": "14"}, {"prompt": "8+8=", "label": "16"}])
    write_jsonl(data / "pairs.jsonl", [{"prompt": f"{i}+1=", "response": f"{i + 1}"} for i in range(9)])
    run_distributed(check, 2, tmp_path)

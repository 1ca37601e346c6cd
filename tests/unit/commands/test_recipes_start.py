"""Every configuration of examples/ passes its dry run with the published config.json of the model that it names.

The commands are those of the pages, word by word, and the flags of their tables of sizes. A new file is tested by
itself: with the number of processes that it is planned on, or the fewest.
"""

from __future__ import annotations

import json
import re
import runpy
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from megatron_dppo.commands.main import main
from megatron_dppo.config.io import load_config
from megatron_dppo.config.schema import Config
from megatron_dppo.hf.folder import read_hf_config
from megatron_dppo_convert.upcycled_config import Upcycling, upcycled_config
from megatron_dppo_lab.embedded_tasks import MODEL_TASKS, write_model_folder
from megatron_dppo_lab.smollm2 import MIXTURE
from tests.unit.published_folders import (
    published_config,
    published_weights,
    write_holes,
    write_published_folder,
    write_tokenizer,
)
from tests.unit.test_doc_blocks import PAGES, ROOT

EXAMPLES = ROOT / "examples"
FILES = sorted(EXAMPLES.rglob("*.toml"))
PLANNED = re.compile(r"^# Planned on (\d+) x \w+\.$", re.M)
COMMAND = re.compile(
    r"^(?:WORLD_SIZE=(?P<size>\d+) )?megatron-dppo train (?P<file>examples/\S+\.toml) (?P<rest>.*--dry-run.*)$", re.M
)
NAMES = {"smollm2": "SmolLM2-135M"}
"""Published model of a folder that an example makes itself."""
PARAMETERS = {
    "qwen3_5_35b_a3b": "34,660,610,688",
    "gpt_oss_20b": "20,914,757,184",
    "qwen3_5_397b_a17b": "396,346,350,336",
    "qwen3_30b_a3b": "30,532,122,624",
}


class DryRun(NamedTuple):
    """One dry run of a file of examples/."""

    file: Path
    world_size: int | None
    flags: tuple[str, ...]


def table_rows(page: str) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield trainer processes and flags of each row in a README's table of sizes.

    A cell "those of 2, `--more`" has the flags of the row of 2 nodes, too.
    """
    columns: list[str] = []
    flags_by_nodes: dict[str, tuple[str, ...]] = {}
    rows = []
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if "flags" in cells and "trainer GPUs" in cells:
            columns = cells
        elif not cells:
            columns = []
        elif columns and not set(line) <= set("|-"):
            row = dict(zip(columns, cells, strict=True))
            flags = tuple(word for span in re.findall("`([^`]+)`", row["flags"]) for word in span.split())
            flags_by_nodes[row["nodes"]] = flags
            rows.append(row)
    for row in rows:
        other = re.match(r"those of (\d+)", row["flags"])
        base = flags_by_nodes[other[1]] if other else ()
        yield int(row["trainer GPUs"].partition(",")[0]), base + flags_by_nodes[row["nodes"]]


def dry_runs() -> list[DryRun]:
    """Return the dry runs of all files: of the pages, of the READMEs' tables, and one of each other file."""
    runs = set()
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for match in COMMAND.finditer(text):
            flags = match["rest"].partition(" #")[0].split()
            flags.remove("--dry-run")
            size = int(match["size"]) if match["size"] else None
            if "--world-size" in flags:
                index = flags.index("--world-size")
                size = int(flags[index + 1])
                del flags[index : index + 2]
            runs.add(DryRun(ROOT / match["file"], size, tuple(flags)))
        file = page.with_name("dppo.toml")
        if page.is_relative_to(EXAMPLES) and file.exists():
            runs |= {DryRun(file, size, flags) for size, flags in table_rows(text)}
    for file in {*FILES} - {run.file for run in runs}:
        planned = PLANNED.search(file.read_text(encoding="utf-8"))
        runs.add(DryRun(file, int(planned[1]) if planned else None, ()))
    return sorted(runs, key=str)


def parameters() -> Iterator[Any]:
    for run in dry_runs():
        name = f"{run.file.parent.name}/{run.file.stem}-{run.world_size}-{' '.join(run.flags)}"
        yield pytest.param(run, id=name, marks=pytest.mark.slow)


def write_models(config: Config, folder: Path) -> None:
    """Write the models that a configuration names and that do not ship with it."""
    paths = [config.model.path, config.model.reference_path, config.distillation.teacher_path]
    for path in {path for path in paths if path is not None and not Path(path).is_absolute()}:
        target, name = folder / path, Path(path).name
        if path.startswith("runs/vf_sums_data/"):
            sys.argv = ["prepare.py", str(target.parent)]
            runpy.run_path(str(EXAMPLES / "agents/vf_sums/prepare.py"))["main"]()
            shutil.copytree(target.parent / "model", target)
            write_holes(target, published_weights(read_hf_config(target), is_nested=False))
        elif name in MODEL_TASKS:
            write_model_folder(name, target)
            write_holes(target, published_weights(read_hf_config(target), is_nested=False))
        elif name.endswith("-moe"):
            write_upcycled_folder(target, name.removesuffix("-moe"))
        else:
            write_published_folder(target, NAMES.get(name, name))
    for options in [config.reward.options, *(each.options for each in config.reward.functions.values())]:
        if "tokenizer" in options:
            write_tokenizer(folder / str(options["tokenizer"]))


def write_upcycled_folder(target: Path, dense: str) -> None:
    """Write the mixture of ``megatron-dppo examples smollm2-moe`` without the values of its weights."""
    source = target.with_name("dense")
    write_published_folder(source, NAMES[dense])
    values = upcycled_config(read_hf_config(source), Upcycling(**MIXTURE), source)
    target.mkdir()
    (target / "config.json").write_text(json.dumps(values))
    write_tokenizer(target)
    write_holes(target, published_weights(read_hf_config(target), is_nested=False))


def data_flags(config: Config, folder: Path) -> Iterator[str]:
    """Yield overrides of the data sets that are not here: of the hub, and those that a user brings."""
    sources = {"train": config.data.train}
    held_out = config.data.eval
    sources |= {f"eval.{name}": source for name, source in held_out.items()} if isinstance(held_out, dict) else {}
    sources |= {"eval": held_out} if isinstance(held_out, str) else {}
    for number, (key, source) in enumerate(sources.items()):
        if isinstance(source, str) and not source.startswith("task:") and not Path(source).is_absolute():
            file = folder / f"{key}.jsonl"
            rows = ({"prompt": f"{number}+{index}=", "label": str(number + index)} for index in range(64))
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
            yield from (f"--data.{key}", str(file))


@pytest.mark.parametrize("run", parameters())
def test_a_recipe_starts_with_the_published_model(
    run: DryRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if run.world_size is not None:
        monkeypatch.setenv("WORLD_SIZE", str(run.world_size))
    file = tmp_path / run.file.relative_to(ROOT)
    # The disk of a cluster: the largest recipe keeps 20 TB of checkpoints.
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=10**14, used=0, free=10**14))
    config = load_config(file)
    write_models(config, file.parent)
    if config.agent.command:  # The program of the user.
        (tmp_path / config.agent.command[-1]).touch()
    arguments = [*run.flags, *data_flags(config, tmp_path)]
    assert main(["train", str(file.relative_to(tmp_path)), "--dry-run", *arguments]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert "All checks passed." in out and (run.world_size is None or f"layout   {run.world_size} processes" in out)
    assert f"model    {PARAMETERS.get(file.parent.name, '')}" in out


def test_the_servers_of_a_recipe_are_planned_with_the_published_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The pages' ``serve --dry-run``, which refuses a model that is not there."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    files = {*re.findall(r"^megatron-dppo serve (examples/(?!chain_sum)\S+\.toml) --dry-run$", text, re.M)}
    assert files
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    for name in files:
        assert main(["serve", name, "--dry-run"]) == 2 and "config.json is missing" in capsys.readouterr().err
        write_models(load_config(name), (tmp_path / name).parent)
        assert main(["serve", name, "--dry-run"]) == 0 and "--model-path" in capsys.readouterr().out


def test_pages_and_tables_are_read() -> None:
    runs = dry_runs()
    assert {run.file for run in runs} == {*FILES}
    sizes = [(run.world_size, "--optimizer-cpu-offload" in run.flags) for run in runs if "35b" in run.file.parent.name]
    assert {(8, True), (16, False), (32, False)} <= {*sizes}
    colocated = [run for run in runs if "--rollout.servers.colocated" in run.flags]
    assert {run.file.parent.name for run in colocated} == {"qwen3_30b_a3b", "qwen3_5_35b_a3b", "gpt_oss_20b"}


def test_a_model_without_a_published_config_is_named() -> None:
    with pytest.raises(KeyError, match="Unheard-Of-7B"):
        published_config("Unheard-Of-7B")

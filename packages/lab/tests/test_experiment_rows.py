"""Rows of the store and of other machines: whole ones are taken, broken ones are told with file and line."""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiment_rows import row_of
from megatron_dppo.commands.main import main
from megatron_dppo.errors import UserError
from megatron_dppo.process.lock import LOCK
from megatron_dppo_lab import demo, report, runner
from megatron_dppo_lab.catalogue import LOSSES
from megatron_dppo_lab.experiment import SEARCH_SEEDS, Block, Claim, Experiment, choose
from megatron_dppo_lab.named import EXPERIMENTS
from megatron_dppo_lab.row import read_external_rows
from megatron_dppo_lab.store import Store

DOCS = Path(__file__).parents[3] / "docs/results/windtunnel"
LONG = EXPERIMENTS["long_tail"].report(True, (0, 1), ())
Damage = Callable[[dict[str, Any]], object]


def write(file: Path, *rows: dict[str, Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def test_rows_of_another_machine_are_taken_over_where_they_belong_to_the_grid(tmp_path: Path) -> None:
    store, runs = Store(tmp_path / "here"), LONG
    rows = [row_of(run, store) for run in runs]
    other_base, other_grid = {**rows[0], "base": "rare_words-0-00000000"}, {**rows[1], "key": "0" * 16}
    other_settings = {**rows[2], "settings": {**rows[2]["settings"], "loss": {}}}
    file = tmp_path / "rows.jsonl.xz"
    lines = [json.dumps(row) for row in (other_base, other_grid, other_settings, *rows[3:], rows[4])]
    file.write_bytes(lzma.compress("\n".join(lines).encode()))
    new = store.new_rows(read_external_rows(file), runs)
    assert new == {row["key"]: row for row in rows[3:]} and not store.folder.exists()
    store.add(new, runs)
    assert store.read(runs) == new
    assert not store.new_rows(read_external_rows(file), runs)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("\n", "\r\n"),
        lambda text: text.replace("\n", "\n \n\n"),
        lambda text: "\ufeff" + text,
        lambda text: text.rstrip("\n"),
        lambda text: text.replace('"error"', '"note": "a\u2028b\u2029c\x85d\x0b", "error"').replace("\x0b", "\\u000b"),
    ],
    ids=["crlf", "blank", "bom", "no end", "u2028"],
)
def test_a_file_that_an_editor_or_another_tool_has_written_is_read(
    change: Callable[[str], str], tmp_path: Path
) -> None:
    store = Store(tmp_path)
    text = "".join(json.dumps(row_of(run, store)) + "\n" for run in LONG)
    file = tmp_path / "rows.jsonl"
    file.write_bytes(change(text).encode())
    assert len(store.new_rows(read_external_rows(file), LONG)) == len(LONG)


def put(*path: str | int, value: Any) -> Damage:
    def damage(row: Any) -> None:
        for name in path[:-1]:
            row = row[name]
        row[path[-1]] = value

    return damage


def cut(*path: str | int) -> Damage:
    def damage(row: Any) -> None:
        for name in path[:-1]:
            row = row[name]
        del row[path[-1]]

    return damage


BROKEN: list[tuple[Damage, str]] = [
    *((cut(name), f"{name} is missing") for name in row_of(LONG[0], Store(Path("x")))),
    *((put(name, value=[1]), rf"{name} = \[1\]: ") for name in ("key", "base", "seed", "curves", "settings")),
    (put("seed", value=True), "seed = True: "),
    (put("seed", value=-1), "seed = -1: "),
    (put("phase", value="x"), "phase = 'x': "),
    (put("error", value=None), "error = None: "),
    (put("error", value="\ud800"), "field 'error' holds half of a UTF-16 pair"),
    (put("curves", "\ud800", value=[1.0]), "field 'curves' holds half of a UTF-16 pair"),
    (cut("settings", "run"), "settings.run is missing"),
    (put("settings", "run", "num_steps", value="4"), "settings.run.num_steps = '4': "),
    (put("curves", "train/ratio", value=[0.5, None]), "curves.train/ratio.1 = None: "),
    (put("curves", "train/ratio", value=[10**400]), "curves.train/ratio.0 = 1000"),
    (put("curves", "train/ratio", value=[float("nan")]), r"not usable JSON \(NaN is not JSON"),
    (put("curves", "train/ratio", value="0.5"), "curves.train/ratio = '0.5': "),
    (put("curves", value={}), "curves has 0 values of rollout/reward, and settings.run.num_steps is"),
    (put("curves", "rollout/reward", value=[0.0] * 999), "curves has 999 values of rollout/reward"),
    (put("cpu_seconds", value=float("inf")), r"not usable JSON \(Infinity is not JSON"),
    (put("task", value="chain_sum"), "task = 'chain_sum', but this run has 'rare_words'"),
    (put("seed", value=7), "seed = 7, but this run has 0"),
]


@pytest.mark.parametrize(("damage", "problem"), BROKEN)
def test_a_broken_row_is_told_with_its_line_and_in_the_store_with_its_file_before_any_work(
    damage: Damage,
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(runner, "execute_jobs", lambda *_, **__: pytest.fail("a run was started"))
    store, runs = Store(tmp_path / "here"), EXPERIMENTS["long_tail"].report(True, (0,), ())
    row = json.loads(json.dumps(row_of(runs[0], store)))
    damage(row)
    file = write(tmp_path / "rows.jsonl", row_of(runs[-1], Store(Path("x"), 5)), row)
    with pytest.raises(UserError, match=f"--rows {file}, line 2: {problem}"):
        store.new_rows(read_external_rows(file), runs)
    stored = store.row(runs[0])
    stored.parent.mkdir(parents=True)
    write(stored, row)
    command = ["experiment", "long_tail", "--quick", "--seeds", "0", "--output", str(store.folder)]
    for more in ([], ["--list"]):
        assert main([*command, *more]) == 2
        error = capsys.readouterr().err
        assert f"{stored}: " in error and "Fix: remove this file" in error and "Traceback" not in error
    stored.unlink()
    assert len(store.read(runs)) == 0


@pytest.mark.parametrize("text", ["", "3", "{", '{"key": "a', "[" * 9999, '{"a": 1, "a": 2}', "{}\n{}", "\xff"])
def test_what_is_no_row_is_told(text: str, tmp_path: Path) -> None:
    store, file = Store(tmp_path), tmp_path / "rows.jsonl"
    store.make_folders()
    for place in (file, store.row(LONG[0])):
        place.write_bytes(b"\n" * (place == file) + text.encode("latin-1"))
    if text:
        with pytest.raises(UserError, match=r"line 2: .*rows\.jsonl"):
            read_external_rows(file)
    with pytest.raises(UserError, match=f"{store.row(LONG[0])}"):
        store.read(LONG)


def test_every_broken_row_of_the_store_is_told_at_once_and_a_row_of_another_run_is_one(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.make_folders()
    write(store.row(LONG[0]), row_of(LONG[1], store))
    store.row(LONG[1]).mkdir()
    settings = {**LONG[2].settings, "loss": {}}
    write(store.row(LONG[2]), row_of(LONG[2], store, settings=settings))
    with pytest.raises(UserError) as caught:
        store.read(LONG)
    text = str(caught.value)
    assert f"key = '{LONG[1].key}', but this run has '{LONG[0].key}'" in text
    assert "Is a directory" in text and "settings are not those of the run" in text


def test_files_of_rows_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    whole = lzma.compress(b"{}\n" * 100)
    for name, data in (("a.xz", b""), ("b.xz", whole[:-9]), ("c.xz", b"{}"), ("d.jsonl", whole)):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UserError, match=rf"^--rows .*{name}.*(xpected|copy) the rows\.jsonl"):
            read_external_rows(tmp_path / name)
    for place in (tmp_path, tmp_path / "none"):
        with pytest.raises(UserError, match=r"^--rows .*expected the rows\.jsonl"):
            read_external_rows(place)


def test_new_runs_start_from_the_weights_of_the_rows_that_are_there(tmp_path: Path) -> None:
    store, runs = Store(tmp_path), LONG
    base = store.base(runs[0])
    rows = {run.key: row_of(run, store) for run in runs[1:] if store.base(run) == base}
    unrelated = [key for key, row in rows.items() if row["mismatch"] != runs[0].mismatch]
    assert not store.require_same_bases({key: rows.pop(key) for key in unrelated}, runs[:1]), "compared with no new run"
    assert rows
    note = store.require_same_bases(rows, runs[:1])
    assert note.startswith(f"{len(rows)} rows do not say from which weights they start")
    assert not store.require_same_bases(rows, []), "nothing new is compared with them"
    base.mkdir(parents=True)
    (base / "model.safetensors").write_bytes(b"weights")
    here = hashlib.sha256(b"weights").hexdigest()[:16]
    said = {key: {**row, "base_weights": here} for key, row in rows.items()}
    assert not store.require_same_bases(said, runs[:1])
    (base / "model.safetensors").write_bytes(b"weights, trained again")
    with pytest.raises(UserError, match=f"{base.name} with .*{here}"):
        store.require_same_bases(said, runs[:1])
    (base / "model.safetensors").unlink()
    base.rmdir()
    with pytest.raises(UserError, match="cannot be compared"):
        store.require_same_bases(said, runs[:1])


def test_a_stopped_run_has_a_row_with_fewer_steps(tmp_path: Path) -> None:
    store, runs = Store(tmp_path), LONG
    row = row_of(runs[0], store, error="TrainingStopped: no", curves={})
    store.add(store.new_rows(read_external_rows(write(tmp_path / "r.jsonl", row)), runs), runs)
    assert store.read(runs)[runs[0].key] == row


def test_a_row_gets_the_names_that_its_run_has_here(tmp_path: Path) -> None:
    """It may have been made for another experiment's report, or say anything."""
    store, runs = Store(tmp_path), EXPERIMENTS["windtunnel"].search(quick=False)
    mine = [run for run in runs if run.loss == "grpo"]
    rows = [row_of(run, store, phase="report", candidate=99, loss="x") for run in mine]
    store.add({run.key: row for run, row in zip(mine, rows, strict=True)}, mine)
    result = store.read(mine)
    assert {row["seed"] for row in result.values()} == set(SEARCH_SEEDS)
    assert choose(result.values())["rare_words", "grpo"][0] == 0


def test_all_published_rows_are_whole(tmp_path: Path) -> None:
    counts = {"figures": 185, "precision": 45, "rows": 953}
    handed = {name: read_external_rows(DOCS / f"{name}.jsonl.xz") for name in counts}
    assert {name: len(rows) for name, rows in handed.items()} == counts
    store = Store(tmp_path)
    for name, file in (("stability", "figures"), ("bad_updates", "figures"), ("precision", "precision")):
        runs = EXPERIMENTS[name].report(False, None, ())
        assert len(store.new_rows(handed[file], runs)) == len(runs)


STAGED = Experiment(
    "staged",
    "Two stages",
    blocks=(
        Block("rare_words", ("dppo_topk_tv tuned", "pg_is"), ("staleness 8",), {}),
        Block("rare_words_32k", ("grpo tuned", "dppo_topk_tv tuned"), ("none",), {}, searched_on="rare_words"),
        Block("rare_words", ("grpo tuned",), ("none",), {}),
    ),
    quick=(),
    claims=(Claim("A", "dppo_topk_tv tuned", "pg_is"),),
    seeds=(0, 1),
    search_under="staleness 8",
    has_paired_tests=True,
)


def _pretend_runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    """Write a row for each job instead of training. Return the list that receives (phase, task, seed) of each run."""
    executed = []

    def pretend(jobs: list[Any], *_: object, **__: object) -> None:
        for job in jobs:
            if job.result.suffix != ".json":
                job.result.mkdir()
                continue
            run = job.arguments[0]
            executed.append((run.phase, run.task, run.seed))
            # The second candidate of every search is the best one.
            curves = {"rollout/reward": [0.1 * (run.candidate == 1)] * run.settings["run"]["num_steps"]}
            job.result.write_text(json.dumps(row_of(run, Store(job.result.parents[1]), curves=curves)))

    monkeypatch.setattr(runner, "execute_jobs", pretend)
    return executed


def test_stages_resume_here_and_on_another_machine_without_repeating_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    executed = _pretend_runs(monkeypatch)
    here, there = str(tmp_path / "here"), str(tmp_path / "there")
    # Eight runs of a search, four reported ones of the first stage, and part of the next one.
    report.execute(STAGED, report.Request(here, limit=11))
    assert [phase for phase, *_ in executed] == ["search"] * 8 + ["report"] * 3
    text = (tmp_path / "here/staged/table.md").read_text()
    assert "| search on rare_words | 8 of 16 | no |" in text and "1 of 2 seeds" in text
    assert "| rare_words, staleness 8 | 3 of 4 | no |" in text
    # The reported setting is the searched one, and the verdict names it.
    assert "dppo_topk_tv tuned (dppo_topk_tv, ratio_cap 5.0, delta 0.15)" in text
    report.execute(STAGED, report.Request(here, limit=0))
    assert len(executed) == 11 and (tmp_path / "here/staged/table.md").read_text() == text
    report.execute(STAGED, report.Request(there, limit=2, rows=[f"{here}/staged/rows.jsonl"]))
    assert executed[11:] == [("report", "rare_words", 1), ("search", "rare_words", 100)]
    report.execute(STAGED, report.Request(there))
    wanted = [*STAGED.search(False), *STAGED.report(False, None, ())]
    assert len(executed) == len({run.key for run in wanted})
    capsys.readouterr()
    report.execute(STAGED, report.Request(here, list_only=True, rows=[f"{there}/staged/rows.jsonl"]))
    assert capsys.readouterr().out.splitlines() == [
        f"{len(executed) - 11} rows would be imported from {there}/staged/rows.jsonl"
    ]
    # The key is of the full configuration: with another threshold of one loss, its runs are missing again.
    changed = LOSSES["pg_is"].__class__("pg_is", {"name": "pg_is", "entropy_coef": 0.1})
    monkeypatch.setitem(LOSSES, "pg_is", changed)
    report.execute(STAGED, report.Request(there, list_only=True))
    assert [line.split(maxsplit=1)[1] for line in capsys.readouterr().out.splitlines()] == [
        f"report  rare_words, staleness 8, pg_is, seed {seed}" for seed in (0, 1)
    ]


def test_the_list_counts_what_would_be_taken_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "here"
    files = [str(write(tmp_path / f"{i}.jsonl", *(row_of(r, Store(output)) for r in LONG[:i]))) for i in (3, 5)]
    command = ["experiment", "long_tail", "--quick", "--seeds", "0", "1", "--output", str(output)]
    assert main([*command, "--list", "--rows", *files]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"{n} rows would be imported from {f}" for n, f in zip((3, 2), files, strict=True)]
    assert len(lines) == 2 + len(LONG) - 5 and not output.exists()


def test_each_file_of_rows_is_told_once_with_its_total(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "execute_jobs", lambda *_, **__: pytest.fail("a run was started"))
    output = tmp_path / "here"
    file = str(write(tmp_path / "rows.jsonl", *(row_of(r, Store(output)) for r in LONG)))
    command = ["experiment", "long_tail", "--quick", "--seeds", "0", "1", "--output", str(output)]
    for total in (len(LONG), 0):
        assert main([*command, "--rows", file, file]) == 0
        told = [line for line in capsys.readouterr().out.splitlines() if "imported" in line]
        assert told == [f"{total} rows imported from {file}", f"0 rows imported from {file}"]
    assert not (output / LOCK).exists()


def test_a_second_command_in_the_folder_is_refused_and_only_lists(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (report, demo):
        monkeypatch.setattr(module, "execute_runs", lambda *_: pytest.fail("a run was started"))
    name, store = str(tmp_path), Store(tmp_path)
    experiment = ["experiment", "long_tail", "--quick", "--output", name]
    with store.held():
        working = store.work_folder(LONG[0]) / "run"
        working.mkdir(parents=True)
        for command in (experiment, ["demo", "--output", name]):
            assert main(command) == 2
            error = capsys.readouterr().err
            assert f"--output = {name!r} is in use by another command: process " in error
            assert "--jobs" in error and "another --output" in error and "--rows" in error
        assert main([*experiment, "--list"]) == 0
        assert working.is_dir() and not (tmp_path / "long_tail-quick").exists()
    assert not (tmp_path / LOCK).exists()


@pytest.mark.parametrize("command", [["experiment", "long_tail", "--quick"], ["demo"]])
def test_an_output_that_can_be_no_folder_is_refused(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (report, demo):
        monkeypatch.setattr(module, "execute_runs", lambda *_: pytest.fail("a run was started"))
    file = tmp_path / "file"
    file.write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "rows").write_text("mine")
    lists = [["--list"]] if command[0] == "experiment" else []
    for place in (file, file / "below", tmp_path / ("n" * 300)):
        for more in ([], *lists):
            assert main([*command, "--output", str(place), *more]) == 2
            assert f"--output {place}: " in capsys.readouterr().err
    for place in (tmp_path / "link", tmp_path / "taken"):
        assert main([*command, "--output", str(place)]) == 2
        assert "cannot be created: File exists. Fix: remove" in capsys.readouterr().err
    assert file.read_text() == "mine" and (tmp_path / "taken" / "rows").read_text() == "mine"
    assert not (tmp_path / "taken" / LOCK).exists()

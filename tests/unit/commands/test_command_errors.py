"""Damaged records, targets, odd files, interrupts at the command line: one line that names them, and nothing lost."""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dppo.commands import main as program
from megatron_dppo.config.io import load_config
from megatron_dppo.errors import CheckpointError, ConfigError, DataError, DiskError
from megatron_dppo.hf.folder import read_hf_config
from megatron_dppo.report.records import read_metrics, read_records
from megatron_dppo.setup.starts import record_start
from megatron_dppo_doctor.doctor.command import Redactor
from megatron_dppo_doctor.replay import command as replay
from megatron_dppo_doctor.replay.replay import load_config_of_step, read_record
from megatron_dppo_lab import examples
from megatron_dppo_port import command as port
from megatron_dppo_report import command as report
from megatron_dppo_report.build import check_target

EXAMPLE = Path(__file__).parents[3] / "examples/chain_sum"
GOOD = [{"step": step, "train/loss": step / 4, "eval/accuracy": None} for step in range(4)]


def written(folder: Path, *lines: str | bytes, end: str = "\n") -> Path:
    path = folder / "metrics.jsonl"
    encoded = [line if isinstance(line, bytes) else line.encode() for line in lines]
    path.write_bytes(b"\n".join(encoded) + end.encode())
    return path


TEXTS = [json.dumps(record) for record in GOOD]


def test_what_a_crash_leaves_at_the_end_is_left_out_and_no_more(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "nothing.jsonl") == []
    assert read_metrics(written(tmp_path, *TEXTS)) == GOOD
    assert read_metrics(written(tmp_path, *TEXTS, end="")) == GOOD  # cut between the record and its line break
    for end in ('{"step": 4, "tra', "{", "\0\0\0", '{"step"'):
        assert read_metrics(written(tmp_path, *TEXTS, end="\n" + end)) == GOOD
    assert read_metrics(written(tmp_path, TEXTS[0], "", TEXTS[1], "  ")) == GOOD[:2]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (TEXTS[1][:-1], "not JSON"),
        (b"\xff\xfe\0", "not JSON"),
        ("[1]", "expected a JSON object, got"),
        ("null", "got NoneType"),
        ("[" * 100_000, "not JSON"),
        ('{"a": 1}', "expected an integer"),
        ('{"step": "x"}', "as step, got 'x'"),
        ('{"step": true}', "step, got True"),
        ('{"step": -1}', "as step, got -1"),
        ('{"step": NaN}', "step, got nan"),
        ('{"step": 1, "x": {"a": 1}}', "null as x, got {'a': 1}"),
        ('{"step": 1, "x": Infinity}', "as x, got inf"),
        ('{"step": 1, "x": NaN}', "as x, got nan"),
        ('{"step": 1, "x": "1"}', "as x, got '1'"),
    ],
)
def test_a_bad_line_is_named_wherever_it_stands(line: str | bytes, problem: str, tmp_path: Path) -> None:
    for place in range(3):
        lines: list[str | bytes] = [TEXTS[0], TEXTS[2]]
        lines.insert(place, line)
        path = written(tmp_path, *lines)
        with pytest.raises(DataError) as caught:
            read_metrics(path)
        assert f"{path}, line {place + 1}: " in str(caught.value) and problem in str(caught.value)


def test_answers_may_hold_texts_and_a_folder_is_no_file(tmp_path: Path) -> None:
    assert read_records(written(tmp_path, '{"step": 1, "prompt": "2+2"}')) == [{"step": 1, "prompt": "2+2"}]
    with pytest.raises(DataError, match="a file, but a run"):
        read_records(tmp_path)


def test_a_step_without_a_record_is_not_replayed(tmp_path: Path) -> None:
    written(tmp_path, *TEXTS)
    assert read_record(tmp_path, 2) == GOOD[2]
    with pytest.raises(DataError, match="record of step 9"):
        read_record(tmp_path, 9)


def test_targets_are_looked_at_before_the_work(tmp_path: Path) -> None:
    """The run and the launch are not there either: the target is named first."""
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name, problem in {
        "mine": "exists",
        "link": "exists",
        ".": "exists",
        "no/x": "in a folder that does not",
    }.items():
        target = tmp_path / name
        replayed = argparse.Namespace(run=tmp_path / "none", step=1, json=target)
        with pytest.raises(ConfigError, match=problem):
            replay.run(replayed, [])
        with pytest.raises(ConfigError, match=problem):
            port.run(port_options(tmp_path / "none.sh", target), [])
        with pytest.raises(ConfigError, match=problem):
            check_target(target)
    assert (tmp_path / "mine").read_text() == "mine"
    with pytest.raises(ConfigError, match="not a report"):
        check_target(Path("/dev/full"))
    with pytest.raises(ConfigError, match="is not a folder"):
        replay.run(argparse.Namespace(run=tmp_path / "none", step=1, json=None), [])
    with pytest.raises(DiskError, match=r"a file|File exists"):
        examples.run(argparse.Namespace(name=["chain_sum"], to=str(tmp_path / "mine")), [])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "mine"]


@pytest.mark.parametrize("seconds", [0.0, -5.0, float("nan"), float("inf")])
def test_a_watch_that_never_looks_is_refused(seconds: float, tmp_path: Path) -> None:
    options = argparse.Namespace(run=tmp_path, more_runs=[], output=None, ledger=None, watch=seconds)
    with pytest.raises(ConfigError, match="seconds, at least 1"):
        report.run(options, [])


def port_options(file: Path, output: Path | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    port.add_arguments(parser)
    return parser.parse_args([str(file), *(["--output", str(output)] if output else [])])


def test_a_launch_that_is_nested_without_end_or_counts_to_infinity_is_no_traceback(tmp_path: Path) -> None:
    deep = tmp_path / "deep.yaml"
    deep.write_text("a: " + "[" * 3000 + "]" * 3000)
    with pytest.raises(ConfigError, match="nested too deeply"):
        port.run(port_options(deep), [])
    endless = tmp_path / "run.sh"
    endless.write_text("python3 -m verl.trainer.main_ppo trainer.nnodes=1e400 trainer.n_gpus_per_node=8\n")
    assert port.run(port_options(endless), []) in (0, 1)
    for text in (
        "X=ab; while true; do X=$X$X; done\n",
        "X=ab; for ((i = 0; i < 900; i++)); do X=$X$X; done\n",
        "A=(a b); for ((i = 0; i < 900; i++)); do A+=(${A[@]}); done\n",
        "f() { f; f; }; f\n",
        "f() { g; g; }; g() { h; h; }; h() { for i in {1..9} 2 3; do f; done; }; f\n",
        "if $Q; then " * 300 + "X=1;" + " fi;" * 300 + "\n",
        "N=3; for ((i = 0; i < 900; i++)); do ((N = N * N)); done\n",
    ):
        endless.write_text(text + "python3 -m verl.trainer.main_ppo trainer.nnodes=1\n")
        with contextlib.suppress(ConfigError):
            port.run(port_options(endless), [])


def test_an_interrupt_and_a_reader_that_leaves_end_a_command_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("megatron_dppo.commands.help.run", interrupted)
    assert program.main(["help"]) == 130 and capsys.readouterr().err == "\ninterrupted\n"
    command = [
        sys.executable,
        "-u",
        "-c",
        "import sys; from megatron_dppo.commands.main import main; sys.exit(main(['help']))",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert (process.stderr.read(), process.wait(60)) == (b"", 141)


def test_messages_name_what_the_user_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    conversion = ["convert", "hf-to-megatron", str(tmp_path), "OUT"]
    for more, message in (
        (
            ["--tensor-model-parallel-size", "0"],
            "--tensor-model-parallel-size 0: expected a number of ranks, at least 1",
        ),
        (["--experts", "4"], "unexpected argument '--experts'; see megatron-dppo convert hf-to-megatron --help"),
    ):
        assert program.main([*conversion, *more]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"--servers http://\[::1: .*expected URLs as http://host:port"):
        Redactor({}, ["http://[::1"])
    model = json.loads((EXAMPLE / "model/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(model | {"hidden_size": "big"}))
    with pytest.raises(CheckpointError, match=r"config.json .*hidden_size"):
        read_hf_config(tmp_path)


def test_a_bad_override_of_a_recorded_step_names_the_run_s_own_file(tmp_path: Path) -> None:
    config = load_config(EXAMPLE / "dppo.toml", ["--run.output_dir", str(tmp_path)])
    (tmp_path / ".megatron_dppo_run.json").write_text("{}")
    record_start(tmp_path, config, world_size=1, layout="", resumed_step=None, changes=[], contents={})
    assert load_config_of_step(tmp_path, 1, ["--loss.name", "grpo"]).loss.name == "grpo"
    with pytest.raises(ConfigError) as caught:
        load_config_of_step(tmp_path, 1, ["--loss.name", "nosuch"])
    assert str(tmp_path / "config.toml") in str(caught.value) and "nosuch" in str(caught.value)

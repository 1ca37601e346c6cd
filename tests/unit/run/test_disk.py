"""A full disk costs one line and nothing that was there before."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron_dppo import files as disk
from megatron_dppo.commands.eval import add_arguments
from megatron_dppo.commands.eval import run as run_eval
from megatron_dppo.commands.reported import report_error
from megatron_dppo.config.run import LogConfig
from megatron_dppo.errors import ConfigError, DiskError, UserError
from megatron_dppo.export.hf_folder import save_hf_folder
from megatron_dppo.files import disk_errors, format_bytes, require_space, write_synced
from megatron_dppo.hf.folder import build_hf_model, read_hf_config, stream_model
from megatron_dppo.report.metrics import MetricsWriter
from megatron_dppo.report.records import read_metrics
from megatron_dppo.run.evaluation import write_sample_responses
from megatron_dppo.run.offline import OfflineEvaluation

MODEL = Path(__file__).parents[3] / "examples/chain_sum/model"


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Callable[[], None]]:
    """A file system of 1 MB; call the result to fill it. Where it cannot be mounted, a limit on the size of files."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True)
    if mounted.returncode == 0:
        try:
            yield lambda: fill(folder)
        finally:
            subprocess.run(["umount", "-l", folder], check=True)
        return
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fill(folder: Path) -> None:
    file = os.open(folder / "filler", os.O_WRONLY | os.O_CREAT)
    with contextlib.suppress(OSError):
        while True:
            os.write(file, b"x" * 4096)
    os.close(file)


def write_metrics(folder: Path) -> tuple[Callable[[], None], Callable[[], object]]:
    sink = MetricsWriter(folder, {}, LogConfig(tensorboard=False), resumed_step=None)
    sink.write(1, {"a": 1.0})

    def again() -> None:
        with disk_errors(sink.path, "the metrics"):
            for step in range(2, 200):
                sink.write(step, {f"metric {i}": 1 / 3 for i in range(100)})

    return again, lambda: read_metrics(sink.path)[0]


def write_answers(folder: Path) -> tuple[Callable[[], None], Callable[[], object]]:
    target = folder / "samples.jsonl"
    target.write_text(json.dumps({"step": 0, "prompt": "p", "label": "l", "response": "r", "reward": 1.0}) + "\n")
    completion = SimpleNamespace(text="y" * 2_000_000)
    group = SimpleNamespace(
        prompt=SimpleNamespace(text="p", label="l"), rollouts=[SimpleNamespace(completion=completion, score=1.0)]
    )
    return lambda: write_sample_responses(folder, [group], 3, None), target.read_text  # type: ignore[list-item,return-value]


def write_model(folder: Path) -> tuple[Callable[[], None], Callable[[], object]]:
    target = folder / "hf"
    target.mkdir()
    (target / "config.json").write_text("the older one")
    model = build_hf_model(read_hf_config(MODEL), torch.float32)

    def again() -> None:
        with disk_errors(target, "the weights"):
            save_hf_folder(target, MODEL, stream_model(model), torch.float32)

    return again, (target / "config.json").read_text


def write_checkpoint(folder: Path) -> tuple[Callable[[], None], Callable[[], object]]:
    torch.save({"older": 1}, folder / "older.pt")

    def again() -> None:
        with disk_errors(folder / "new.pt", "the checkpoint"):
            torch.save({"w": torch.zeros(1_000_000)}, folder / "new.pt")

    return again, lambda: torch.load(folder / "older.pt", weights_only=True)


def write_rollouts(folder: Path) -> tuple[Callable[[], None], Callable[[], object]]:
    save_file({"older": torch.ones(1)}, folder / "older.safetensors")

    def again() -> None:
        with disk_errors(folder / "new", "the rollouts"):
            save_file({"w": torch.zeros(1_000_000)}, folder / "new")

    return again, (folder / "older.safetensors").read_bytes


@pytest.mark.parametrize("kind", [write_metrics, write_answers, write_model, write_checkpoint, write_rollouts])
def test_a_full_disk_is_a_one_line_error_that_leaves_old_files_intact(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    folder = tmp_path / "disk"
    with small_disk(folder) as make_full:
        again, older = kind(folder)
        before = older()
        make_full()
        with pytest.raises(DiskError) as raised:
            again()
        message = str(raised.value)
        assert "\n" not in message and str(folder) in message and "free on its file system" in message
        assert ("full" in message or "limit" in message) and raised.value.exit_code == 2
        assert older() == before


@pytest.mark.parametrize("full", ["--answers", "--json"])
def test_eval_leaves_no_output_behind_if_one_cannot_be_written(
    full: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = contextlib.nullcontext(SimpleNamespace(weights="w"))
    monkeypatch.setattr("megatron_dppo.commands.eval.open_weights", lambda *_, **__: weights)

    def evaluate(_: object) -> OfflineEvaluation:
        return OfflineEvaluation({"eval/accuracy": 0.5}, iter([{"response": "y" * 9000}] * 9))

    monkeypatch.setattr("megatron_dppo.run.offline.evaluate", evaluate)
    folder = tmp_path / "disk"
    with small_disk(folder) as make_full:
        files = {name: (folder if name == full else tmp_path) / "out" for name in ("--answers", "--json")}
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        options = parser.parse_args(["target", *(str(each) for item in files.items() for each in item)])
        make_full()
        with pytest.raises(DiskError, match="same command"):
            run_eval(options, [])
        assert not [file for file in files.values() if file.exists()]
        (folder / "filler").unlink(missing_ok=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert run_eval(options, []) == 0, "the advice of the message"
        assert len(files["--answers"].read_text().splitlines()) == 9 and json.loads(files["--json"].read_text())


def test_two_outputs_of_eval_in_one_file_are_refused_before_the_evaluation(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(ConfigError, match="name two files"):
        run_eval(parser.parse_args(["target", "--json", f"{tmp_path}/x", "--answers", f"{tmp_path}/x"]), [])


def test_a_file_that_is_replaced_leaves_no_part_on_a_full_disk(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    with small_disk(folder) as make_full:
        write_synced(folder / "report.html", "older")
        make_full()
        with pytest.raises(OSError, match=r"space|large"):
            write_synced(folder / "report.html", "y" * 9000)
        assert (folder / "report.html").read_text() == "older" and not list(folder.glob("*.partial"))


def test_closing_the_log_on_a_full_disk_does_not_hide_another_error(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as make_full:
        sink = MetricsWriter(tmp_path / "disk", {}, LogConfig(), resumed_step=None)
        make_full()
        with pytest.raises(OSError, match=r"space|large"):
            sink.write(1, {f"metric {i}": 1 / 3 for i in range(1000)})
        sink.close()


def test_the_error_of_a_full_device_has_the_message_of_the_kernel(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="disk is full"), disk_errors(Path("/dev/full"), "nothing"):
        Path("/dev/full").write_text("x")


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ENOSPC, "the disk"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "right to write"),
        (errno.EDQUOT, "quota"),
        (errno.EIO, "input/output"),
        (errno.EFBIG, "ulimit -f"),
        (errno.EMFILE, "ulimit -n"),
        (errno.ENAMETOOLONG, "name is too"),
    ],
)
@pytest.mark.parametrize("wrap", ["plain", "cause", "text", "rust", "failures", "argument"])
def test_the_cause_is_extracted_from_wrapped_errors(number: int, reason: str, wrap: str, tmp_path: Path) -> None:
    cause = OSError(number, os.strerror(number))
    failed = type("CheckpointException", (BaseException,), {"failures": {0: (cause, "trace")}})
    errors: dict[str, BaseException] = {
        "plain": cause,
        "text": RuntimeError(f"worker 3 died: OSError: [Errno {number}] {os.strerror(number)}: 'x'"),
        "rust": ValueError(f"Error while serializing: IoError(... (os error {number}))"),
        "failures": failed("write"),
        "argument": RuntimeError("worker", cause),
    }
    with pytest.raises(DiskError) as raised, disk_errors(tmp_path, "it"):
        if wrap == "cause":
            raise RuntimeError("saving failed") from cause
        raise errors[wrap]
    assert reason in str(raised.value)


def test_a_library_error_without_a_cause_is_shown_in_one_line(tmp_path: Path) -> None:
    """A rank whose own writes went well gets such an exception too: it has no cause."""
    raised_there = RuntimeError("unexpected pos 64\nvs 0")
    failed = type("CheckpointException", (BaseException,), {"failures": {1: (raised_there, "trace")}})
    with pytest.raises(DiskError) as raised, disk_errors(tmp_path, "the checkpoint of step 3"):
        raise failed("CheckpointException ranks:dict_keys([1])\nTraceback ...")
    message = str(raised.value)
    assert "its library does not report" in message and "Its message: RuntimeError: unexpected pos 64 vs 0 (" in message
    assert "\n" not in message and "Traceback" not in message


def test_the_cause_is_extracted_from_the_context_and_cycles_end(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match=r"full \(.*free"), disk_errors(tmp_path, "it"):
        try:
            raise OSError(errno.ENOSPC, "full")
        except OSError:
            raise RuntimeError("saving failed")  # noqa: B904
    with pytest.raises(DiskError, match="disk is full"), disk_errors(tmp_path, "it"):
        raise RuntimeError("worker", OSError(errno.ENOSPC, "in words of its own"))
    one, other = RuntimeError("one"), RuntimeError("other")
    one.__cause__, other.__cause__ = other, one
    with pytest.raises(RuntimeError, match="one"), disk_errors(tmp_path, "it"):
        raise one


@pytest.mark.parametrize("text", ["PytorchStreamWriter failed writing file data/0", "unexpected pos 64 vs 0", None])
def test_an_error_without_a_reason_says_so(text: str | None, tmp_path: Path) -> None:
    untold = type("CheckpointException", (BaseException,), {})("write")
    with pytest.raises(DiskError, match="does not report"), disk_errors(tmp_path, "it"):
        raise untold if text is None else RuntimeError(text)


def test_the_message_has_the_file_even_without_the_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(_: Path) -> int:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(disk, "free_bytes", unreadable)
    with (
        pytest.raises(DiskError, match=r"\(/other/file\): the disk"),
        disk_errors(tmp_path, "it"),
    ):
        raise OSError(errno.ENOSPC, "full", "/other/file")


def test_other_errors_pass(tmp_path: Path) -> None:
    for error in (
        ValueError("shapes differ"),
        ValueError("os error 111"),
        OSError(errno.ECONNREFUSED, "refused"),
        KeyboardInterrupt(),
    ):
        with pytest.raises(type(error)) as raised, disk_errors(tmp_path, "it"):
            raise error
        assert raised.value is error
    with pytest.raises(DiskError, match="inner"), disk_errors(tmp_path, "outer"), disk_errors(tmp_path, "inner"):
        raise OSError(errno.ENOSPC, "full")


def test_free_space_is_read_from_the_nearest_existing_parent(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk"):
        require_space(tmp_path / "disk/not/there", 1000, "a file")
        with pytest.raises(DiskError, match=r"a model needs about 10.0 TB"):
            require_space(tmp_path / "disk/not/there", 10**13, "a model")
    assert not (tmp_path / "disk/not").exists()
    assert [format_bytes(n) for n in (3, 1500, 2_000_000, 10**16)] == ["3 bytes", "1.5 kB", "2.0 MB", "10000.0 TB"]


def test_the_command_line_prints_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised, disk_errors(tmp_path, "the metrics"):
        raise OSError(errno.ENOSPC, "full")
    assert report_error(raised.value) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1

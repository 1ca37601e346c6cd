"""SIGTERM to two ranks in the middle of an evaluation or an export: what is under way ends, and nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_dppo.data import tasks as chain_sum
from tests.e2e.runs import command, environment, records
from tests.e2e.test_resume import assert_same_run
from tests.e2e.test_signals import Run
from tests.engines.servers import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.long]

GATES = '''
import pathlib, sys, time
FOLDER = pathlib.Path(__file__).parent

def gate(name):
    """Waits while the test keeps this place closed, and says so."""
    while (FOLDER / f"closed-{name}").exists():
        (FOLDER / f"waiting-{name}").touch()
        time.sleep(0.01)

def reward(*, prompt, completion, label, metadata):
    gate(metadata.get("kind", "sampling"))
    return float(len(completion) % 7)

def watch_renames():
    """A gate before each folder that gets its name when it is complete: ``hf.partial`` waits at ``hf``."""
    def look(event, arguments):
        if event == "os.rename" and str(arguments[0]).endswith(".partial"):
            gate(pathlib.Path(arguments[0]).stem)
    sys.addaudithook(look)
'''


class Ranks(Run):
    """Two ranks in one process group, as srun starts them: torchrun would hide their exit codes."""

    def _start(self, arguments: list[str], processes: int) -> subprocess.Popen[bytes]:
        assert processes == 2
        self.folder, port = self._log.parent, free_port()
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        common |= {"PYTHONUNBUFFERED": "1"}
        started: list[subprocess.Popen[bytes]] = []
        with self._log.open("w") as file:
            for rank in range(2):
                process = subprocess.Popen(
                    command(arguments, 1),
                    env=environment(self.folder) | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=file,
                    stderr=file,
                    process_group=started[0].pid if started else 0,
                )
                started.append(process)
        self.other = started[1]
        return started[0]

    def waits_at(self, name: str) -> None:
        self.until((self.folder / f"waiting-{name}").exists)

    def open(self, name: str) -> None:
        (self.folder / f"closed-{name}").unlink()

    def stop_at(self, name: str) -> str:
        """SIGTERM to the group while it waits at a gate; what it has printed at its end."""
        self.waits_at(name)
        os.killpg(self.process.pid, signal.SIGTERM)
        self.until(lambda: "SIGTERM  the run ends" in self.output)
        self.open(name)
        assert self.ends_well(), self.output
        return self.output

    def ends_well(self) -> bool:
        return (self.end(), self.other.wait(60)) == (0, 0)


@pytest.fixture
def start() -> Iterator[Callable[[Path], Ranks]]:
    """Starts the same run each time: it evaluates at step 0, 2 and 4, and saves at its end or when it is stopped."""
    started: list[Ranks] = []

    def run(folder: Path) -> Ranks:
        ranks = Ranks(
            *(folder, folder.parent / f"{folder.name}.log", 2),
            **{"data__eval": folder.parent / "eval.jsonl", "eval__every": 2, "checkpoint__save_every": 1000},
            checkpoint__keep_best="false",
        )
        started.append(ranks)
        return ranks

    yield run
    for process in (process for ranks in started for process in (ranks.process, ranks.other)):
        process.kill()  # nothing of a test that failed waits at a gate for ever
        process.wait()


def write_files(folder: Path) -> None:
    (folder / "blocking.py").write_text(GATES)
    (folder / "sitecustomize.py").write_text("import blocking\nblocking.watch_renames()\n")
    rows = [{"prompt": p.question, "label": str(p.answer), "kind": "evaluation"} for p in chain_sum.problems("eval")]
    (folder / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def steps(folder: Path) -> list[int]:
    return [record["step"] for record in records(folder)]


def test_stops_in_exports_and_evaluations_leave_the_run_that_was_never_stopped(
    start: Callable[[Path], Ranks], tmp_path: Path
) -> None:
    """In the evaluations of step 0 and 2, and the final export."""
    write_files(tmp_path)
    undisturbed, folder = start(tmp_path / "undisturbed"), tmp_path / "run"
    assert undisturbed.ends_well(), undisturbed.output

    def close(name: str) -> None:
        (tmp_path / f"waiting-{name}").unlink(missing_ok=True)
        (tmp_path / f"closed-{name}").touch()

    close("evaluation")
    output = start(folder).stop_at("evaluation")
    assert "stopped  by SIGTERM before the next step" in output and steps(folder) == [0], output
    assert not (folder / "checkpoints").exists()

    close("sampling")
    run = start(folder)
    run.waits_at("sampling")  # the evaluation of step 0 is over
    close("evaluation")
    run.open("sampling")
    output = run.stop_at("evaluation")
    assert "stopped  by SIGTERM after step 2" in output and steps(folder) == [0, 1, 2], output
    assert [path.name for path in run.checkpoints.iterdir()] == ["step_000002"]
    assert records(folder)[-1].keys() >= {"eval/accuracy", "train/loss"}, "the evaluation that was under way is there"

    close("hf")
    output = start(folder).stop_at("hf")
    assert "resumed" in output and "(step 2" in output and "\nwritten\n" in output, output
    assert_same_run(folder, tmp_path / "undisturbed")

    run = start(folder)
    assert run.ends_well() and "(step 4" in run.output, run.output
    assert_same_run(folder, tmp_path / "undisturbed")

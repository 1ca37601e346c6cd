"""Reward functions that fork, exit, print, signal or return nonsense: every other sample keeps its own score."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

from megatron_dppo.errors import RewardError
from megatron_dppo.rewards import FunctionSpec, RewardItem, RewardResult, RewardScorer
from megatron_dppo.rewards.item import read_batch

FUNCTIONS = r'''
import ctypes, decimal, fractions, itertools, multiprocessing, os, pathlib, signal, subprocess, sys, threading, time
import numpy

class Rude(Exception):
    def __str__(self):
        raise RuntimeError("no text")

class RudeObject:
    def __float__(self):
        raise Rude
    def __repr__(self):
        raise Rude

class Text(str):
    """Cannot be unpickled elsewhere."""

class Number(float):
    pass

def returning_twice(fork):
    def reward(label):
        fork()
        return label
    return reward

def both_forks_raise(label):
    os.fork()
    raise ValueError("after a fork")

def child(label, how):
    pid = os.fork()
    if pid == 0:
        how()
        return -1.0
    os.waitpid(pid, 0) if how is not time.sleep else None
    return label

def thread_that_forks(label):
    thread = threading.Thread(target=os.fork)
    thread.start()
    thread.join()
    return label

def with_multiprocessing(label):
    context = multiprocessing.get_context("fork")
    with context.Pool(2) as pool:
        return pool.map(float, [label])[0]

def terminated(label):
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    process.start()
    process.terminate()
    process.join()
    return label if process.exitcode == -signal.SIGTERM else -1.0

def noisy(label):
    print("7.0", flush=True)
    sys.stderr.write("noise\n")
    os.write(1, b"raw\n")
    assert sys.stdin.read() == "" and subprocess.run(["cat"], stdout=subprocess.PIPE).stdout == b""
    sys.stdout = None
    return label

def descriptors(label):
    os.closerange(3, 4096)  # the one to the trainer too, whatever its number is
    return label

def segfault(label):
    import resource
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.string_at(0)

def raising(error):
    def reward(label):
        raise error
    return reward

def giving(value):
    return lambda label: value

GOOD = {
    "fork, both return": returning_twice(os.fork),
    "fork behind Python's back": returning_twice(lambda: ctypes.CDLL(None).fork()),
    "fork twice": returning_twice(lambda: (os.fork(), os.fork())),
    "child exits": lambda label: child(label, lambda: os._exit(3)),
    "child sys.exits": lambda label: child(label, lambda: sys.exit(3)),
    "child raises": lambda label: child(label, lambda: 1 / 0),
    "thread that forks": thread_that_forks,
    "multiprocessing": with_multiprocessing,
    "own child terminated": terminated,
    "prints and reads": noisy,
    "sigterm": lambda label: (os.kill(os.getpid(), signal.SIGTERM), label)[1],
    "sigint": lambda label: (os.kill(os.getpid(), signal.SIGINT), label)[1],
    "numpy": lambda label: numpy.float32(label),
    "numpy 0-d": lambda label: numpy.array(label),
    "torch": lambda label: __import__("torch").tensor(label),
    "decimal": lambda label: decimal.Decimal(label),
    "fraction": lambda label: fractions.Fraction(label),
    "number of its own": lambda label: {"score": Number(label), "name": Text("x"), Text("part"): Number(2)},
    "surrogate": lambda label: {"score": label, "\ud800": 1.0},
    "largest": lambda label: {"score": label, "large": 1e30, "text": "x"},
}
BAD = {
    "sys.exit": raising(SystemExit("done")),
    "KeyboardInterrupt": raising(KeyboardInterrupt()),
    "GeneratorExit": raising(GeneratorExit()),
    "no text": raising(Rude()),
    "surrogate in error": raising(ValueError("\ud800")),
    "long error": raising(ValueError("x" * 10**6)),
    "both forks raise": both_forks_raise,
    "rude object": giving(RudeObject()),
    "1e39": giving(1e39),
    "-1e39": giving({"score": -1e39}),
    "inf": giving(float("inf")),
    "numpy nan": giving(numpy.float64("nan")),
    "torch inf": lambda label: __import__("torch").tensor(float("inf")),
    "huge integer": giving(10**5000),
    "huge part": giving({"score": 1, "part": -(10**5000)}),
    "complex": giving(1j),
    "numpy complex": giving(numpy.complex64(1)),
    "numpy complex 0-d": giving(numpy.array(1j)),
    "vector": giving(numpy.ones(3)),
    "list": giving([1.0]),
    "function": giving(print),
    "bytes": giving(b"1"),
    "empty table": giving({}),
    "descriptors": descriptors,
    "segfault": segfault,
    "os._exit": lambda label: os._exit(0),
    "kill itself": lambda label: os.kill(os.getpid(), signal.SIGKILL),
}
ERRORS = {
    "sys.exit": "SystemExit: done",
    "KeyboardInterrupt": "KeyboardInterrupt",
    "GeneratorExit": "GeneratorExit",
    "no text": "Rude (its text cannot be read)",
    "surrogate in error": "ValueError: ?",
    "long error": "ValueError: xxx",
    "both forks raise": "ValueError: after a fork",
    "rude object": "Rude (its text cannot be read)",
    "1e39": "the reward must be between -1e+30 and 1e+30, got 1e+39",
    "-1e39": "the score must be between -1e+30 and 1e+30",
    "inf": "the reward must be a finite number, got inf",
    "numpy nan": "must be a finite number, got",
    "torch inf": "must be a finite number, got",
    "huge integer": "the reward must be a finite number",
    "huge part": "the part 'part' must be a finite number",
    "complex": "the reward must be a number, got 1j",
    "numpy complex": "the reward must be a number",
    "numpy complex 0-d": "the reward must be a number",
    "vector": "TypeError",
    "list": "TypeError",
    "function": "TypeError",
    "bytes": "the reward must be a number, got b'1'",
    "empty table": "exactly one of 'score' and 'reward'",
    "descriptors": "the scoring process died",
    "segfault": "the scoring process died (signal SIGSEGV)",
    "os._exit": "the scoring process died (exit code 0)",
    "kill itself": "the scoring process died (signal SIGKILL)",
}
def one(*, prompt, completion, label, metadata):
    return (GOOD | BAD)[completion](float(label)) if completion != "plain" else float(label)

async def together(*, prompt, completion, label, metadata):
    return one(prompt=prompt, completion=completion, label=label, metadata=metadata)

def batch(completions, label, **columns):
    return [one(prompt="", completion=c, label=l, metadata={}) for c, l in zip(completions, label)]

def daemon(*, prompt, completion, label, metadata):
    """Leaves a child, one in a session of its own, and a daemon; each writes its id and stays."""
    write = f"echo $$ >>{label}; exec sleep 600"
    subprocess.Popen(["sh", "-c", write])
    subprocess.Popen(["sh", "-c", write], start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(0, 4096)
            with open(label, "a") as file:
                file.write(f"{os.getpid()}\n")
            time.sleep(600)
        os._exit(0)
    while len(pathlib.Path(label).read_text().split()) < 3:
        time.sleep(0.01)
    time.sleep(600 if completion == "stay" else 0)
    return 1.0
'''
module: dict = {}
exec(FUNCTIONS, module)
NAMES = [*module["GOOD"], *module["BAD"]]


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    (tmp_path / "hostile.py").write_text(FUNCTIONS)
    return tmp_path / "hostile.py"


def score(function: str, names: list[str], workers: int = 2) -> list[RewardResult]:
    # Between two hostile ones a plain one, whose score must be its own.
    texts = [text for name in names for text in (name, "plain")]
    items = [RewardItem(prompt="", completion=text, label=str(i / 8)) for i, text in enumerate(texts)]
    scorer = RewardScorer(FunctionSpec(function), 60.0, workers)
    try:
        results = scorer.score(items)
    finally:
        scorer.close()
    for i, (text, result) in enumerate(zip(texts, results, strict=True)):
        if text in module["ERRORS"]:
            assert result.failed and module["ERRORS"][text] in result.error, (text, result)
            assert len(result.error) <= 2000 and result.error.isprintable()
        else:
            assert not result.failed and result.reward == i / 8, (text, result)
            assert all(type(name) is str and name.isprintable() for name in result.parts)
    return results


def test_every_hostile_function_affects_only_its_own_sample(functions: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert module["ERRORS"].keys() == module["BAD"].keys()
    score(f"{functions}:one", NAMES)
    shown = capfd.readouterr()
    assert "raw" in shown.out and "noise" in shown.err


@pytest.mark.parametrize("name", ["together", "batch"])
def test_hostile_functions_affect_only_their_sample_in_batches(name: str, functions: Path) -> None:
    score(f"{functions}:{name}", ["fork, both return", "sys.exit", "no text", "1e39", "child sys.exits", "sigterm"], 1)


def test_an_endless_batch_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"3 rewards .*more than 3"):
        read_batch(iter(int, 1), 3)


def test_a_module_that_exits_at_import_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(0)")
    with pytest.raises(RewardError, match="cannot be imported: SystemExit"):
        RewardScorer(f"{tmp_path}/leaves.py:f", 1.0, 1)


def test_a_signal_during_a_sample_retries_it(tmp_path: Path) -> None:
    """A step signal of Slurm reaches the programs of a reward function, too, and would change its score."""
    (tmp_path / "slow.py").write_text(
        textwrap.dedent(
            """
            import pathlib, subprocess
            def score(*, prompt, completion, label, metadata):
                pathlib.Path(label).open("a").write("called ")
                return float(subprocess.run(["sleep", "1.5"]).returncode == 0)
            """
        )
    )
    calls = tmp_path / "calls"
    scorer = RewardScorer(f"{tmp_path}/slow.py:score", 60.0, 1)
    results: list[RewardResult] = []
    item = RewardItem(prompt="", completion="", label=str(calls))
    thread = threading.Thread(target=lambda: results.extend(scorer.score([item])))
    thread.start()
    family = until(lambda: calls.exists() and len(psutil.Process().children(recursive=True)) > 1 and sleepers())
    assert {os.getsid(pid) for pid in family}.isdisjoint({os.getsid(0)}), "a signal to the trainer's group stays away"
    for pid in family:
        os.kill(pid, signal.SIGTERM)
    thread.join()
    scorer.close()
    assert (results[0].reward, results[0].failed, calls.read_text()) == (1.0, False, "called called ")


def sleepers() -> list[int]:
    """A scoring process and the ``sleep`` that it has started."""
    for process in psutil.Process().children(recursive=True):
        if process.name() == "sleep":
            return [process.ppid(), process.pid]  # as Slurm does, the older one first
    return []


def until(found, seconds: float = 60.0):
    end = time.monotonic() + seconds
    while not (result := found()):
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.02)
    return result


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


PROGRAM = """
import sys
from megatron_dppo.rewards import RewardItem, RewardScorer
from megatron_dppo.process.orphans import no_orphans
if __name__ == "__main__":
    with no_orphans():
        scorer = RewardScorer(sys.argv[1], 600.0, 1)
        scorer.score([RewardItem(prompt="", completion=sys.argv[3], label=sys.argv[2])])
        print("scored", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["exit", "kill -9"])
def test_processes_left_by_a_function_end_with_the_run(functions: Path, tmp_path: Path, ending: str) -> None:
    """Also after a SIGKILL of the trainer, and without ``close``."""
    pids, program = tmp_path / "pids", tmp_path / "program.py"
    pids.touch()
    program.write_text(PROGRAM)
    argument = "stay" if ending == "kill -9" else "return"
    process = subprocess.Popen([sys.executable, str(program), f"{functions}:daemon", str(pids), argument])
    try:
        until(lambda: len(pids.read_text().split()) == 3 or process.poll() is not None)
        left = [int(pid) for pid in pids.read_text().split()]
        assert len(left) == 3 and (ending == "exit" or all(map(runs, left)))
        if ending == "kill -9":
            process.kill()
        assert process.wait(60) == (0 if ending == "exit" else -signal.SIGKILL)
        until(lambda: not any(map(runs, left)), 20)
    finally:
        process.kill()

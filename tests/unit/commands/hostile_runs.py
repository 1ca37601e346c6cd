"""Mutated folders of a run, and the commands that look at them."""

from __future__ import annotations

import copy
import json
import os
import random
import resource
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_dppo.commands.main import main
from megatron_dppo.config.io import load_config
from megatron_dppo.errors import UserError
from megatron_dppo.mcore.checkpoint.folder import read_state
from megatron_dppo.mcore.checkpoint.manifest import hash_files, list_files, write_manifest
from megatron_dppo.report.records import compare_responses
from megatron_dppo.rollout.saved import SchedulerState
from megatron_dppo.run.evaluation import read_sample_responses
from megatron_dppo.run.guard_state import GuardState
from megatron_dppo.run.run_state import RunState
from megatron_dppo.setup.contents import read_contents
from megatron_dppo.setup.preflight import Start, find_problems
from megatron_dppo.setup.resume import find_usable_checkpoint, layout_identity, run_identity
from megatron_dppo.setup.run_folder import open_folder

EXAMPLE = Path(__file__).parents[3] / "examples/chain_sum"
SECONDS = 60
"""Time limit of a case: a hang, even on a loaded machine."""
EVIL = """
from pathlib import Path
Path({trace!r}).touch()
def function(*args, **options):
    return 0.0
"""
MARKER = {"run_id": "a" * 32, "submission": "", "created": "2026-01-01 00:00:00", "moving_to": ""}
DEEP: Any = []
for _ in range(200):
    DEEP = [DEEP]
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1.5, 10**30, 10**400, -(2**63), 1e300, float("nan"), float("inf"), "", "x", "x" * 5000),
    *("\0", "../../outside", "\x1b[2J\u202e", [], {}, [[]], [None], {"": None}, DEEP, "evil.py:function"),
)
RAW = (
    b"",
    b"[]",
    b"null",
    b"3",
    b'"x"',
    bytes(range(256)),
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b"\xef\xbb\xbf{}",
    b"{}\n" * 50,
)
RAW += (b"9" * 10_000, b"NaN", b"1e999", b'{"step": 1}\n{"step": 1e99}\n', b"\n\n\n", b"{" * 10)


READERS = {
    "step_000001": ("dry run", "resume"),
    ".megatron_dppo_run.json": ("open",),
    "starts.jsonl": ("replay", "diagnose", "report"),
    "metrics.jsonl": ("report", "dry run"),
    "samples.jsonl": ("samples",),
}
"""Commands that read a file; most cases pair the two."""


class HostileRuns:
    """A run's folder that a command accepts, and mutations of it.

    Args:
        root: Empty folder, the working directory.
        with_functions: Name an evil file as loss, mask, advantage, reward and generate function.
    """

    def __init__(self, root: Path, *, with_functions: bool) -> None:
        self.root = root
        self.with_functions = with_functions
        self.run = root / "run"
        self.outside = root / "outside"
        self.trace = root / "executed"
        self.outside.mkdir()
        (self.outside / "file").write_text("untouched")
        (root / "evil.py").write_text(EVIL.format(trace=str(self.trace)))
        text = (EXAMPLE / "dppo.toml").read_text().replace('"model"', f'"{EXAMPLE}/model"')
        text = text.replace('"runs/chain_sum"', '"run"').replace("model_parallel_size = 2", "model_parallel_size = 1")
        self.config_text = text
        self.toml = root / "copy.toml"
        self.toml.write_text(text)
        config = load_config(self.toml)
        start = Start(config, 1, 0, dry_run=True)
        assert not find_problems(start) and start.inputs is not None
        values = start.config.model_dump(mode="json")
        self.state = {
            "step": 1,
            "policy_version": 2,
            "skipped_in_a_row": 0,
            "answers_before": [{"prompt": "1+1", "label": "2", "response": "3", "reward": 0.0}],
            "best": [0.5, 1],
            "evaluation_due": False,
            "stream": {
                "cursor": 4,
                "next": 2,
                "ages": {"0": 1},
                "waiting": [[[3, 1]]],
                "draws": [[{"step": 2, "sampled_at": 1, "places": [[2, 1]]}]],
            },
            "identity": run_identity(start.config.lora, start.config.run.seed, start.inputs),
            "layout": layout_identity(start.config.model, start.config.parallel, start.inputs),
            "config": values,
            "cwd": str(root),
            "contents": read_contents(values).contents,
            "guard": {"prob_diffs": [0.1], "stale_prob_diffs": [], "evidence": {"server": {"high": [0.5]}}},
            "finite": True,
        }
        if with_functions:
            evil = f'"{root}/evil.py:function"'
            text = text.replace('name = "dppo_binary_tv"', f"name = {evil}\nmask = {evil}")
            text = text.replace('advantage = "std"', f"advantage = {evil}")
            text = text.replace("[rollout]", f"[rollout]\ngenerate = {evil}") + f"\n[reward]\nfunction = {evil}\n"
            self.config_text = text
        self.start = {
            "number": 1,
            "cwd": str(root),
            "world_size": 1,
            "resumed_step": None,
            "config": values,
            "changes": [],
        }
        self.metrics = [{"step": step, "rollout/reward": 0.5, "perf/step_seconds": 1.0} for step in range(3)]
        self.samples = [{"step": 1, "prompt": "1+1", "label": "2", "response": "3", "reward": 0.0}]

    def write(self) -> None:
        """Write the folder as a run does."""
        checkpoint = self.run / "checkpoints/step_000001"
        checkpoint.mkdir(parents=True)
        self.write_json({})
        (self.run / "config.toml").write_text(self.config_text)
        (self.run / "summary.json").write_text("{}")
        (self.run / "checkpoints/best.json").write_text('{"checkpoint": "step_000001"}')
        (checkpoint / ".metadata").write_bytes(b"not a pickle")
        (checkpoint / "__0_0.distcp").write_bytes(b"shard")
        self.fit_manifest()

    def write_json(self, changed: Mapping[str, Any]) -> None:
        """Write the JSON files, with other values for some."""
        lines = {
            ".megatron_dppo_run.json": MARKER,
            "starts.jsonl": [self.start],
            "metrics.jsonl": self.metrics,
            "samples.jsonl": self.samples,
            "checkpoints/step_000001/state.json": self.state,
        }
        for name, value in (lines | dict(changed)).items():
            is_lines = name.endswith("jsonl") and isinstance(value, list)
            text = "".join(json.dumps(line) + "\n" for line in value) if is_lines else json.dumps(value)
            (self.run / name).write_text(text)

    def fit_manifest(self) -> None:
        checkpoint = self.run / "checkpoints/step_000001"
        write_manifest(checkpoint, hash_files(checkpoint, list_files(checkpoint)))

    def mutate(self, chance: random.Random) -> str:
        """Change the folder at random, and return what was done."""
        kind = chance.choice(["value", "value", "value", "raw", "special", "toml", "moving"])
        if kind == "moving":
            target = chance.choice(
                [str(self.outside), "../../outside", "..", "20260101-000000/../../../outside", "new"]
            )
            self.write_json({".megatron_dppo_run.json": MARKER | {"moving_to": target}})
            return f".megatron_dppo_run.json: moving_to = {target}"
        if kind == "value":
            name, value = chance.choice(
                [
                    ("checkpoints/step_000001/state.json", self.state),
                    ("checkpoints/step_000001/state.json", self.state),
                    (".megatron_dppo_run.json", MARKER),
                    ("starts.jsonl", [self.start]),
                    ("metrics.jsonl", self.metrics),
                    ("samples.jsonl", self.samples),
                ]
            )
            changed = copy.deepcopy(value)
            where = replace_node(changed, chance)
            self.write_json({name: changed})
            if chance.random() < 0.9:
                self.fit_manifest()
            return f"{name}: {where}"
        if kind == "toml":
            key = chance.choice(["extends", "loss.name", "loss.mask", "reward.function", "model.path", "data.train"])
            value = chance.choice(
                ["/dev/zero", "/", str(self.outside), f"{self.root}/evil.py:function", "..", "\\u0000"]
            )
            section, _, name = key.rpartition(".")
            text = f'{name} = "{value}"\n' + self.config_text if not section else self.config_text + f"\n[{section}x]\n"
            if section:
                lines = [
                    line
                    for line in self.config_text.splitlines()
                    if not line.startswith(f"{name} =") or section == "run"
                ]
                text = "\n".join(lines).replace(f"[{section}]", f'[{section}]\n{name} = "{value}"')
            (self.run / "config.toml").write_text(text)
            return f"config.toml: {key} = {value}"
        files = [file.relative_to(self.run) for file in self.run.rglob("*") if file.is_file()]
        name = chance.choice(sorted(files))
        (self.run / name).unlink()
        if kind == "raw":
            content = chance.choice(RAW)
            (self.run / name).write_bytes(content)
            if chance.random() < 0.5 and name.name != "manifest.json":
                self.fit_manifest()
            return f"{name}: {content[:20]!r}"
        label, make = chance.choice(sorted(self.makers().items()))
        make(self.run / name)
        return f"{name}: {label}"

    def makers(self) -> dict[str, Callable[[Path], object]]:
        return {
            "pipe": os.mkfifo,
            "folder": Path.mkdir,
            "loop": lambda file: file.symlink_to(file.name),
            "zero": lambda file: file.symlink_to("/dev/zero"),
            "outside": lambda file: file.symlink_to(self.outside / "file"),
            "nowhere": lambda file: file.symlink_to(self.outside / "new"),
            "nothing": lambda file: None,
        }

    def commands(self) -> dict[str, Callable[[], int]]:
        """Commands that look at the run or the file, and the start of a run as far as it reads the folder."""
        lines = {
            "report": ["report", "run"],
            "eval": ["eval", "run"],
            "generate": ["generate", "run", "--prompt", "1+1="],
            "replay": ["replay", "run", "--step", "1"],
            "diagnose": ["diagnose", "run"],
            "serve": ["serve", "run/config.toml", "--print-mode"],
            "restarts": ["restarts", "decide", "run/config.toml"],
            "dry run": ["train", "copy.toml", "--dry-run"],
            "port": ["port", "run/config.toml"],
            "examples": ["examples", "copy", "chain_sum", "run"],
            "help": ["help", "run/config.toml"],
        }
        return {name: lambda line=line: run_command(line) for name, line in lines.items()} | {
            "open": self.open,
            "resume": self.resume,
            "samples": self.read_samples,
        }

    def resume(self) -> int:
        """Read the newest checkpoint's state as a resume does, on two data-parallel ranks."""
        try:
            checkpoint, _ = find_usable_checkpoint(self.run / "checkpoints")
        except UserError as error:
            return error.exit_code
        if checkpoint is not None:
            state = read_state(checkpoint)
            saved = SchedulerState.from_json(state["stream"]).with_data_parallel_size(2)
            saved.without_submissions(state["step"])
            compare_responses(state["answers_before"], state["answers_before"])
            RunState(
                state["step"], state["skipped_in_a_row"], tuple(state["best"]) if state["best"] else None
            ).is_new_best(0.1)
            assert state["policy_version"] + 1 > 0
            if state.get("guard"):
                GuardState().restore(state["guard"])
        return 0

    def read_samples(self) -> int:
        """Read the responses as the end of a run does."""
        try:
            compare_responses(read_sample_responses(self.run), read_sample_responses(self.run))
        except UserError as error:
            return error.exit_code
        return 0

    def open(self) -> int:
        """Lock and prepare the folder as a run that overwrites does."""
        config = load_config(self.toml, ["--run.overwrite", "true"])
        try:
            with open_folder(config):
                return 0
        except UserError as error:
            return error.exit_code

    def check(self, chance: random.Random) -> str:
        """Run one random case; return the command.

        Raises:
            AssertionError: A traceback, a hang, executed code, or something outside was touched.
        """
        shutil.rmtree(self.run, ignore_errors=True)
        self.write()
        done = self.mutate(chance)
        commands = self.commands()
        readers = next((names for file, names in READERS.items() if file in done), ())
        likely = [each for each in readers if each in commands]
        name = chance.choice(likely if likely and chance.random() < 0.8 else sorted(commands))
        label = f"{name} after {done}"
        try:
            with limits(label):
                code = commands[name]()
        except Exception as error:
            raise AssertionError(f"{label}: {type(error).__name__}: {error}") from error
        assert code in (0, 1, 2), f"{label}: exit code {code}"
        assert not self.trace.exists(), f"{label}: code of the run was executed"
        assert [file.name for file in self.outside.iterdir()] == ["file"], label
        assert (self.outside / "file").read_text() == "untouched", label
        return name


def run_command(arguments: list[str]) -> int:
    try:
        return main(arguments)
    except SystemExit as stop:
        return int(stop.code or 0)


def replace_node(value: Any, chance: random.Random) -> str:
    """Replace a random value of nested JSON values, or delete it, and return where and by what."""
    # Evenly over the outer keys: a configuration has hundreds of inner ones.
    outer = value[0] if isinstance(value, list) else value
    first = chance.choice(sorted(outer))
    nodes = [node for node in _nodes(outer, "") if f"{node[2]}.".startswith(f".{first}.")]
    container, key, where = chance.choice(nodes)
    if isinstance(container, dict) and chance.random() < 0.15:
        del container[key]
        return f"{where} deleted"
    new = chance.choice(VALUES)
    container[key] = new
    return f"{where} = {str(new)[:40]!r}"


def _nodes(value: Any, where: str) -> Iterator[tuple[Any, Any, str]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield value, key, f"{where}.{key}"
        # Configurations are large; two levels of them are enough.
        if where.count(".") < 4:
            yield from _nodes(each, f"{where}.{key}")


@contextmanager
def limits(label: str) -> Iterator[None]:
    """End a case that hangs, or that reads a device without end."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"{label}: no end after {SECONDS} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**32, before[1]))
    try:
        yield
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, before)

"""Router replay on a real mixture of experts: rollouts of SGLang, vLLM and the local engine, all in bf16.

    python benchmarks/paired_replay.py --model FOLDER [--seeds 0 1] [--only sglang,rollout] [--table]

Runs the trainer on two ranks (expert parallel 2) for a few small steps against each engine, with live and with replayed
experts, and appends a row for each finished run to ``--rows``. The same command resumes; ``--table`` only prints.

*Paired*: before the first update of each step, engine and trainer have the same weights. The samples of that step are
scored twice then, with the trainer's live routers and with the engine's experts: the same tokens, one cause removed.
*Sync*: seconds of sending one version of the weights, and the part of it that proves each tensor by its digest.
*Probe*: what ``weights/probe.py`` measured after each sync, which a run prints only when it refuses a server.

A run is ``megatron_dppo.train`` with these measurements around it (``--worker``), and without a checkpoint at its end.
``--adapters RANK`` trains LoRA adapters instead of all weights, for machines with less memory. The router then stays as
it is, and what updates do to the routes is not measured.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

PORT = 31610
SERVERS = {
    "sglang": ["tools/engines/sglang.sh", "serve", "0.5.23"],
    "vllm": ["tools/engines/vllm.sh", "serve", "0.32.0"],
}
SERVER_OPTIONS = {
    "sglang": {"context-length": 512, "max-running-requests": 32, "log-level": "warning"},
    "vllm": {"max-model-len": 512, "max-num-seqs": 32},
}
CONFIG = """
[run]
output_dir = "run"
num_steps = {steps}
overwrite = true
threads_per_rank = 1

[model]
path = {model}
dtype = "bf16"

[parallel]
expert_model_parallel_size = 2

[data]
train = "train.jsonl"
prompt_key = "prompt"
label_key = "label"

[rollout]
prompts_per_step = 4
samples_per_prompt = 4
max_new_tokens = 48
dtype = "bf16"

[reward]
function = {reward}

[loss]
name = "dppo_binary_tv"

[train]
mini_batches = 4
micro_batch_tokens = 2048
advantage = "std"

[optimizer]
lr = {lr}

[checkpoint]
export_hf = false

[log]
tensorboard = false
curves = false
"""
METRICS = (
    "train/abs_prob_diff_first",
    "train/abs_prob_diff",
    "train/kl_k3",
    "train/prob_rise_max",
    "train/prob_drop_max",
    "train/router_disagreement",
    "train/router_live_disagreement",
    "train/router_missing",
    "train/router_weight_diff",
    "train/mask_fraction",
    "train/grad_norm",
    "rollout/reward",
    "rollout/response_length",
    "perf/rollout_seconds",
    "perf/forward_backward_seconds",
    "perf/publish_seconds",
)


@dataclass(frozen=True)
class Variant:
    """One way to sample and to route."""

    engine: str
    replay: str
    has_weights: bool = False
    """``train.router_replay_weights``."""

    @property
    def name(self) -> str:
        """Identifier in rows and on the command line."""
        return ",".join((self.engine, self.replay, *(["weights"] if self.has_weights else [])))


VARIANTS = (
    Variant("sglang", "compare"),
    Variant("sglang", "rollout"),
    Variant("vllm", "off"),
    Variant("local", "compare"),
    Variant("local", "rollout"),
    Variant("local", "rollout", has_weights=True),
)


class Measurements:
    """What a worker adds to a run: records that are appended to a file, on rank 0."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, kind: str, **values: Any) -> None:
        """Append one record."""
        with self._path.open("a") as file:
            file.write(json.dumps({"kind": kind, **values}) + "\n")


def run_worker(arguments: Sequence[str]) -> int:
    """Train with the measurements around it; one rank of torchrun."""
    path, *overrides = arguments
    measurements = Measurements(Path(path))
    _measure_probe(measurements)
    _measure_sync(measurements)
    _measure_samples(measurements)
    sys.argv = ["megatron_dppo.train", *overrides]
    from megatron_dppo.commands.main import train_main

    code = train_main()
    if os.environ["RANK"] == "0":
        measurements.write("memory", peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    return code


def _measure_probe(measurements: Measurements) -> None:
    """Record every verdict with its numbers."""
    from megatron_dppo.errors import ServerError
    from megatron_dppo.weights import probe as trainer_probe
    from megatron_dppo.weights import verdict

    def judge(answer: Any, expected: Any, readings: Any) -> Any:
        tokens = sum(len(generation.token_ids) for generation in answer.generations)
        try:
            result = verdict.judge(answer, expected, readings)
        except ServerError as error:
            measurements.write("probe", passed=False, tokens=tokens, message=str(error))
            raise
        measurements.write("probe", passed=True, tokens=tokens, **_plain(asdict(result)))
        return result

    trainer_probe.judge = judge


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    """``Distance`` tuples by the names of their fields."""
    return {name: value._asdict() if hasattr(value, "_asdict") else value for name, value in fields.items()}


def _measure_sync(measurements: Measurements) -> None:
    """Record the seconds of each sync on rank 0, and those of the proof in it."""
    from megatron_dppo.weights.digests import StreamDigests
    from megatron_dppo.weights.proof import SyncProof, WeightProofs
    from megatron_dppo.weights.publish import LocalPublisher
    from megatron_dppo.weights.sync import WeightSync

    parts = dict.fromkeys(("digests_sent", "digests_server"), 0.0)

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return await call(*args, **kwargs)
            finally:
                parts[name] += time.perf_counter() - begin

        return wrapper

    def timed_add(add: Callable[..., None], self: Any, name: str, tensor: Any) -> None:
        begin = time.perf_counter()
        add(self, name, tensor)
        parts["digests_sent"] += time.perf_counter() - begin

    def sent(send: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        parts.update(dict.fromkeys(parts, 0.0))
        begin = time.perf_counter()
        result = send(self, *args, **kwargs)
        seconds = time.perf_counter() - begin
        problems = {**result.absent, **result.failed}
        notes = sorted(result.notes.values())
        measurements.write(
            "sync", seconds=seconds, **parts, good=len(result.good), problems=sorted(problems.values()), notes=notes
        )
        return result

    def published(publish: Callable[..., Any], self: Any) -> Any:
        begin = time.perf_counter()
        notes = publish(self)
        if os.environ["RANK"] == "0":
            measurements.write("sync", seconds=time.perf_counter() - begin)
        return notes

    WeightProofs.begin = timed("digests_server", WeightProofs.begin)  # type: ignore[method-assign]
    SyncProof.judge = timed("digests_server", SyncProof.judge)  # type: ignore[method-assign]
    StreamDigests.add = functools.partialmethod(  # type: ignore[assignment]
        lambda self, name, tensor, add: timed_add(add, self, name, tensor), add=StreamDigests.add
    )
    WeightSync.send = functools.partialmethod(  # type: ignore[assignment]
        lambda self, *args, send, **kwargs: sent(send, self, *args, **kwargs), send=WeightSync.send
    )
    LocalPublisher.publish = functools.partialmethod(  # type: ignore[assignment]
        lambda self, publish: published(publish, self), publish=LocalPublisher.publish
    )


def _measure_samples(measurements: Measurements) -> None:
    """Score each step's samples before its first update, with live and with replayed experts; write no checkpoint."""
    from megatron_dppo.run import loop

    update = loop.update_policy

    def update_policy(session: Any, collected: Any, samples: Any, *args: Any, **kwargs: Any) -> Any:
        totals = _pair(session, samples)
        if os.environ["RANK"] == "0":
            measurements.write("paired", **totals)
        return update(session, collected, samples, *args, **kwargs)

    loop.update_policy = update_policy
    loop.save_due = lambda session: False


def _pair(session: Any, samples: Sequence[Any]) -> dict[str, float]:
    """Means over the sampled tokens of all ranks: abs(pi - mu), abs(log pi - log mu), the k3 estimate, and rows of
    routes that differ. A collective."""
    import torch

    from megatron_dppo.data.routing import count_differences
    from megatron_dppo.parallel.objects import from_each

    trainer = session.trainer
    packed = trainer.pack(samples, session.config.train.micro_batch_tokens)
    sums: dict[str, float] = {"tokens": 0.0}
    scorings: list[tuple[str, Any]] = [("live", None)]
    if session.config.train.needs_engine_routing:
        scorings = [("live", "record"), ("replayed", "replay")]
    for label, mode in scorings:
        readings, routes = trainer.readings(packed.batches, mode)
        for i, where, number in _positions(packed, samples):
            mask = samples[i].loss_mask
            rollout = samples[i].rollout_logprobs[mask].double()
            policy = readings[number].logprobs[where].cpu()[mask].double()
            difference = policy - rollout
            values = {
                "abs_prob": (policy.exp() - rollout.exp()).abs(),
                "abs_log": difference.abs(),
                "k3": torch.expm1(difference) - difference,
            }
            for name, column in values.items():
                sums[f"{label}_{name}"] = sums.get(f"{label}_{name}", 0.0) + float(column.sum())
            if label == "live":
                sums["tokens"] += float(mask.sum())
            if routes:
                rows, differ = count_differences(samples[i].routed_experts, routes[number][where])[0].tolist()
                sums["rows"] = sums.get("rows", 0.0) + rows
                sums["rows_that_differ"] = sums.get("rows_that_differ", 0.0) + differ
    everywhere = from_each(sums, trainer.groups.world)
    total = {name: sum(part[name] for part in everywhere) for name in sums}
    tokens, rows = total.pop("tokens"), total.pop("rows", 0.0)
    differ = total.pop("rows_that_differ", 0.0)
    means = {name: value / tokens for name, value in total.items()}
    return {"tokens": tokens, **means, **({"routes": differ / rows, "rows": rows} if rows else {})}


def _positions(packed: Any, samples: Sequence[Any]) -> Iterator[tuple[int, slice, int]]:
    """Of each sample: its index, its part of a packed row, and the number of the row."""
    for number, (part, batch) in enumerate(zip(packed.bins, packed.batches, strict=True)):
        for i, start in zip(part, batch.cu_seqlens.tolist(), strict=False):  # a padding sequence may follow
            yield i, slice(start, start + samples[i].num_tokens), number


def write_inputs(options: argparse.Namespace) -> Path:
    """Write configuration and prompts; the sums ask for steps, so that answers are sentences."""
    options.work.mkdir(parents=True, exist_ok=True)
    text = options.prompts.read_text().replace("Answer with the number only.", "Explain each step.")
    (options.work / "train.jsonl").write_text(text)
    config = options.work / "replay.toml"
    values = {"model": json.dumps(str(options.model.resolve())), "reward": json.dumps(str(options.reward.resolve()))}
    config.write_text(CONFIG.format(**values, steps=options.steps, lr=options.lr))
    return config


def environment() -> dict[str, str]:
    """Variables of servers and trainer: one thread each, no network."""
    return {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONWARNINGS": "ignore",
        "HF_HUB_OFFLINE": "1",
    }


def engine_arguments(engine: str) -> list[str]:
    """Overrides of the configuration that choose the engine."""
    arguments = ["--rollout.engine", engine]
    if engine == "local":
        return arguments
    command = [str(REPOSITORY / SERVERS[engine][0]), *SERVERS[engine][1:]]
    arguments += ["--rollout.servers.command", json.dumps(command), "--rollout.servers.port", str(PORT)]
    for name, value in SERVER_OPTIONS[engine].items():
        arguments += [f"--rollout.{engine}.{name}", json.dumps(value)]
    return arguments


def start_servers(engine: str, config: Path, work: Path) -> tuple[subprocess.Popen[bytes], float]:
    """Start ``megatron-dppo serve`` and wait until it is healthy; the process, and the seconds."""
    urls = work / "urls"
    urls.unlink(missing_ok=True)
    replay = "compare" if engine == "sglang" else "off"
    arguments = [sys.executable, "-m", "megatron_dppo.commands.main", "serve", str(config), "--urls-file", str(urls)]
    arguments += ["--log-dir", str(work / f"{engine}-log"), "--train.router_replay", replay]
    arguments += engine_arguments(engine)
    begin = time.perf_counter()
    process = subprocess.Popen(arguments, env=environment(), cwd=work)
    while not urls.exists():
        if process.poll() is not None:
            raise SystemExit(f"{engine}: the server did not start; see {work / f'{engine}-log'}")
        time.sleep(0.5)
    return process, time.perf_counter() - begin


def stop_servers(process: subprocess.Popen[bytes]) -> None:
    """End ``megatron-dppo serve``, which ends its servers."""
    process.send_signal(signal.SIGTERM)
    process.wait()


def wait_for_memory(gibibytes: float) -> None:
    """Wait until this machine has memory for what is started next: other work may share it."""
    while _free_memory() < gibibytes * 2**30:
        time.sleep(5)


def _free_memory() -> int:
    """Bytes that a process can take."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def train(variant: Variant, seed: int, config: Path, work: Path, adapters: int) -> dict[str, Any]:
    """Run the trainer once; its row."""
    run, measured = work / f"{variant.name}-{seed}", work / f"{variant.name}-{seed}.jsonl"
    measured.unlink(missing_ok=True)
    arguments = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments += [str(Path(__file__).resolve()), "--worker", str(measured), str(config)]
    arguments += ["--run.output_dir", str(run), "--run.seed", str(seed), *engine_arguments(variant.engine)]
    arguments += ["--train.router_replay", variant.replay]
    arguments += ["--train.router_replay_weights", str(variant.has_weights).lower()]
    arguments += ["--lora.rank", str(adapters)] if adapters else []
    begin = time.perf_counter()
    with (work / f"{variant.name}-{seed}.log").open("w") as log:
        subprocess.run(arguments, check=True, env=environment(), cwd=work, stdout=log, stderr=subprocess.STDOUT)
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    records = [json.loads(line) for line in measured.read_text().splitlines()]
    row: dict[str, Any] = {
        **asdict(variant),
        "adapters": adapters,
        "seed": seed,
        "seconds": time.perf_counter() - begin,
    }
    row["steps"] = [{name: step[name] for name in METRICS if name in step} for step in steps]
    for record in records:
        row.setdefault(record.pop("kind"), []).append(record)
    return row


def machine() -> str:
    """Processor and number of cores."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores"


def measure(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Run what has no row yet, and append its rows."""
    import datetime

    done = {(*_key(r), r["seed"]) for r in rows}
    variants = [v for v in VARIANTS if options.only is None or v.name in options.only]
    config = write_inputs(options)
    options.rows.parent.mkdir(parents=True, exist_ok=True)
    for engine in dict.fromkeys(variant.engine for variant in variants):
        missing = [(seed, v) for seed in options.seeds for v in variants if v.engine == engine]
        missing = [
            (seed, v) for seed, v in missing if (*_key({**asdict(v), "adapters": options.adapters}), seed) not in done
        ]
        if not missing:
            continue
        process, start_seconds = None, 0.0
        if engine != "local":
            wait_for_memory(options.memory)
            process, start_seconds = start_servers(engine, config, options.work)
        try:
            for seed, variant in missing:
                wait_for_memory(options.memory)
                row = train(variant, seed, config, options.work, options.adapters)
                row |= {"start_seconds": start_seconds, "machine": machine(), "date": f"{datetime.date.today()}"}
                row |= {"load": os.getloadavg()[1], "lr": options.lr}
                rows.append(row)
                with options.rows.open("a") as file:
                    file.write(json.dumps(rounded(row)) + "\n")
                print(f"{variant.name}, seed {seed}: {row['seconds']:.0f} s", flush=True)
        finally:
            if process is not None:
                stop_servers(process)


def rounded(value: Any) -> Any:
    """Floats with five digits."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def print_tables(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the Markdown tables: paired differences, drift, sync and probe."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in sorted(rows, key=lambda r: (r["adapters"], _order(r))):
        name = Variant(row["engine"], row["replay"], row["has_weights"]).name
        groups.setdefault(f"{name}, adapters" if row["adapters"] else name, []).append(row)
    print("\n### Same weights, same tokens\n")
    columns = ("live_abs_prob", "replayed_abs_prob", "live_k3", "replayed_k3", "routes")
    _table("run", ["tokens", *columns], groups, lambda row: _paired(row, columns), {"tokens": sum})
    print("\n### Over the updates\n")
    names = [name for name in METRICS if name.startswith("train/")]
    _table("run", [n.removeprefix("train/") for n in names], groups, lambda row: _last(row, names))
    print("\n### Sync\n")
    columns = ("seconds", "digests_sent", "digests_server")
    _table("run", list(columns), groups, lambda row: {c: _mean(s[c] for s in row["sync"] if c in s) for c in columns})
    print("\n### Probe after each sync\n")
    _table("run", ["passed", "of", "live", "replayed", "median_log_odds", "routes"], groups, _probe, {"passed": sum})
    print(f"\n{len(rows)} runs on {', '.join(sorted({row['machine'] for row in rows}))}")


def _key(row: Mapping[str, Any]) -> tuple[str, str, bool, int]:
    """Identity of a variant, apart from the seed."""
    return row["engine"], row["replay"], row["has_weights"], row["adapters"]


def _order(row: Mapping[str, Any]) -> int:
    """Position of a row's variant in the tables."""
    return VARIANTS.index(Variant(row["engine"], row["replay"], row["has_weights"]))


def _paired(row: Mapping[str, Any], columns: Sequence[str]) -> dict[str, float | None]:
    """Means over the tokens of all steps of a run."""
    parts = row["paired"]
    tokens = sum(part["tokens"] for part in parts)
    values: dict[str, float | None] = {"tokens": tokens}
    for name in columns:
        weights = [(part[name], part["tokens"]) for part in parts if name in part]
        values[name] = sum(value * weight for value, weight in weights) / tokens if weights else None
    return values


def _last(row: Mapping[str, Any], names: Sequence[str]) -> dict[str, float | None]:
    """Means over the steps of a run."""
    return {n.removeprefix("train/"): _mean(step[n] for step in row["steps"] if n in step) for n in names}


def _probe(row: Mapping[str, Any]) -> dict[str, float | None]:
    """Verdicts of a run, and the means of the numbers of those that passed, over tokens."""
    probes = row.get("probe", [])
    values: dict[str, float | None] = {"passed": sum(p["passed"] for p in probes), "of": len(probes)}
    columns = {
        "live": lambda p: p["logprobs"]["probability"],
        "replayed": lambda p: p["replayed"] and p["replayed"]["probability"],
        "median_log_odds": lambda p: p["logprobs"]["odds"],
        "routes": lambda p: p["routes"],
    }
    for name, read in columns.items():
        pairs = [(read(p), p["tokens"]) for p in probes if p["passed"] and read(p) is not None]
        tokens = sum(count for _, count in pairs)
        values[name] = sum(value * count for value, count in pairs) / tokens if tokens else None
    return values


def _mean(values: Iterable[float]) -> float | None:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else None


def _table(
    first: str,
    columns: Sequence[str],
    groups: Mapping[str, Sequence[Mapping[str, Any]]],
    read: Callable[[Mapping[str, Any]], Mapping[str, float | None]],
    totals: Mapping[str, Callable[[Iterable[float]], float]] | None = None,
) -> None:
    """Print one row for each variant: mean over its seeds, and the range."""
    print(f"| {first} | seeds | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 2) + "|")
    for name, rows in groups.items():
        values = [read(row) for row in rows]
        cells = [name, str(len(rows))]
        for column in columns:
            numbers = [v for value in values if (v := value.get(column)) is not None]
            if not numbers:
                cells.append("")
            elif totals and column in totals:
                cells.append(f"{totals[column](numbers):g}")
            else:
                spread = f" ({min(numbers):.3g}..{max(numbers):.3g})" if len(numbers) > 1 else ""
                cells.append(f"{sum(numbers) / len(numbers):.3g}{spread}")
        print("| " + " | ".join(cells) + " |")


def main() -> int:
    """Run what is missing and print the tables."""
    if sys.argv[1:2] == ["--worker"]:
        return run_worker(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    task = REPOSITORY / "examples/smollm2"
    parser.add_argument("--model", type=Path, default=Path("runs/models/smollm2-moe"), help="Hugging Face folder")
    parser.add_argument("--prompts", type=Path, default=task / "train.jsonl", help="JSONL with prompt and label")
    parser.add_argument("--reward", type=Path, default=task / "reward.py", help="file with the function score")
    parser.add_argument("--rows", type=Path, default=REPOSITORY / "docs/real_model/paired_replay.jsonl")
    parser.add_argument("--work", type=Path, default=Path("runs/paired_replay"), help="runs and logs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--adapters", type=int, default=0, metavar="RANK", help="train LoRA adapters of this rank")
    parser.add_argument("--memory", type=float, default=10, help="GiB of free memory that a run waits for")
    parser.add_argument("--only", nargs="+", choices=[v.name for v in VARIANTS], help="variants to run")
    parser.add_argument("--table", action="store_true", help="only print the tables of the rows")
    options = parser.parse_args()
    options.work = options.work.resolve()
    options.reward = Path(f"{options.reward.resolve()}:score")
    rows = [json.loads(line) for line in options.rows.read_text().splitlines()] if options.rows.exists() else []
    if not options.table:
        measure(options, rows)
    print_tables(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Router replay on a real mixture of experts: rollouts of the local engine, SGLang and vLLM, all in bf16.

    python benchmarks/real_model_replay.py [--engines local sglang vllm] [--seeds 0 1] [--table]

Trains SmolLM2 upcycled to four experts (377 M parameters) for three small steps on two ranks (expert parallel 2), with
the trainer's own experts and with the engine's. Appends a row for each finished run to ``--rows`` and prints a table.
The same command resumes. Needs 18 GB of memory and the engines of ``tools/engines/*.sh setup``.

Before the first update of a step, engine and trainer have the same weights. The samples of that step are scored twice
then, with the trainer's own experts and with the engine's: the same tokens, one cause removed. A row also has the
metrics of each step, the seconds of each weight sync with the part that digests take, and the numbers of each probe.

A run is ``megatron_dppo.train`` with these measurements around it (``--worker``) and without checkpoints.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import inspect
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_dppo_lab.example_run import RUNNABLE

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_dppo.policy.trainer import PolicyTrainer
    from megatron_dppo.types import TrainingSample

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "examples/smollm2/moe.toml"
ROWS = ROOT / "docs/results/real_model/paired_replay.jsonl"
SERVERS = {"sglang": ("tools/engines/sglang.sh", "0.5.23"), "vllm": ("tools/engines/vllm.sh", "0.32.0")}
SETTINGS: Mapping[str, Any] = {
    "run.num_steps": 3,
    "run.overwrite": True,
    "run.threads_per_rank": 1,
    "rollout.dtype": "bf16",
    "rollout.prompts_per_step": 4,
    "rollout.samples_per_prompt": 4,
    "rollout.max_new_tokens": 48,
    "loss.name": "dppo_binary_tv",
    "train.micro_batch_tokens": 2048,
    "optimizer.lr": 1e-5,
    "optimizer.lr_warmup_steps": 0,
    "optimizer.lr_decay_style": "constant",
    "eval.every": 0,
    "checkpoint.export_hf": False,
}
"""Over those of ``CONFIG``."""
ENGINE_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "local": {},
    "sglang": {
        "rollout.sglang.context-length": 512,
        "rollout.sglang.max-running-requests": 32,
        "rollout.sglang.log-level": "warning",
    },
    "vllm": {"rollout.vllm.max-model-len": 512, "rollout.vllm.max-num-seqs": 32},
}
METRICS = ("train/abs_prob_diff", "train/kl_k3", "train/router_", "train/mask_fraction", "rollout/re", "perf/")
"""Beginnings of the names that a row has of each step."""
Row = Mapping[str, Any]
"""One line of ``--rows``: variant, seed, metrics of each step, and the worker's records by their kind."""


@dataclass(frozen=True)
class Variant:
    """One way to sample and to route."""

    engine: str
    replay: str
    has_weights: bool = False
    """``train.router_replay_weights``."""

    @property
    def name(self) -> str:
        """Identifier in the table."""
        return "-".join((self.engine, self.replay, *(["weights"] if self.has_weights else [])))


VARIANTS = (
    Variant("local", "compare"),
    Variant("local", "rollout"),
    Variant("local", "rollout", has_weights=True),
    Variant("sglang", "compare"),
    Variant("sglang", "rollout"),
    Variant("vllm", "off"),
)
"""Measured variants. On a CPU, vLLM reports no experts."""


def write_settings(engine: str, model: Path, work: Path) -> dict[str, Any]:
    """Return the settings of servers and trainer; writes prompts that ask for steps, so that answers are sentences."""
    prompts = work / "train.jsonl"
    text = (CONFIG.parent / "train.jsonl").read_text()
    prompts.write_text(text.replace("Answer with the number only.", "Explain each step."))
    settings = {**SETTINGS, "data.train": str(prompts), "model.path": str(model), "rollout.engine": engine}
    if engine in SERVERS:
        script, version = SERVERS[engine]
        settings["rollout.servers.command"] = [str(ROOT / script), "serve", version]
        settings["rollout.servers.port"] = 31610
    return settings | ENGINE_SETTINGS[engine]


def overrides(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as arguments of the command line."""
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in settings.items()}
    return [part for key, text in texts.items() for part in (f"--{key}", text)]


def environment() -> dict[str, str]:
    """Return the variables of servers and trainer: one thread each, no network."""
    quiet = {"TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **quiet, "PYTHONPATH": str(ROOT), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}


@contextmanager
def servers(engine: str, settings: Mapping[str, Any], work: Path) -> Iterator[float]:
    """Keep the servers of an engine running; yields the seconds until they were healthy."""
    if engine not in SERVERS:
        yield 0.0
        return
    urls = work / "urls"
    urls.unlink(missing_ok=True)
    logs = work / f"{engine}-log"
    # One server for all runs: SGLang reports its experts to each of them.
    options = {**settings, "train.router_replay": "compare" if engine == "sglang" else "off"}
    command = [sys.executable, "-m", "megatron_dppo.commands.main", "serve", str(CONFIG), "--urls-file", str(urls)]
    begin = time.perf_counter()
    process = subprocess.Popen([*command, "--log-dir", str(logs), *overrides(options)], env=environment(), cwd=work)
    try:
        while not urls.exists():
            if process.poll() is not None:
                raise SystemExit(f"{engine}: the server did not start; see {logs}")
            time.sleep(0.5)
        yield time.perf_counter() - begin
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def train(variant: Variant, seed: int, settings: Mapping[str, Any], work: Path) -> dict[str, Any]:
    """Train once; return the row of the run."""
    folder = work / f"{variant.name}-{seed}"
    measured = folder.with_suffix(".jsonl")
    measured.unlink(missing_ok=True)
    routing = {"train.router_replay": variant.replay, "train.router_replay_weights": variant.has_weights}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(Path(__file__).resolve()), "--worker", str(measured), str(CONFIG)]
    command += overrides({**settings, **routing, "run.seed": seed, "run.output_dir": str(folder)})
    begin = time.perf_counter()
    with folder.with_suffix(".log").open("w") as log:
        code = subprocess.run(command, env=environment(), cwd=work, stdout=log, stderr=log).returncode
    if code:
        raise SystemExit(f"{variant.name}, seed {seed}: exit code {code}; see {log.name}")
    row: dict[str, Any] = {**asdict(variant), "seed": seed, "seconds": time.perf_counter() - begin}
    steps = read_rows(folder / "metrics.jsonl")
    row["steps"] = [{name: value for name, value in step.items() if name.startswith(METRICS)} for step in steps]
    for record in read_rows(measured):
        row.setdefault(record.pop("kind"), []).append(record)
    return row


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of JSON lines; none if there is no file."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def row_variant(row: Row) -> Variant:
    """Return the variant of a row."""
    return Variant(row["engine"], row["replay"], row["has_weights"])


def measure(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Run what has no row yet; append its rows to the file and to ``rows``."""
    done = {(row_variant(row), row["seed"]) for row in rows}
    options.work.mkdir(parents=True, exist_ok=True)
    model = RUNNABLE["smollm2-moe"].make_model()
    for engine in options.engines:
        variants = [variant for variant in VARIANTS if variant.engine == engine]
        missing = [(variant, seed) for seed in options.seeds for variant in variants if (variant, seed) not in done]
        if not missing:
            continue
        settings = write_settings(engine, model.resolve(), options.work)
        with servers(engine, settings, options.work) as start_seconds:
            for variant, seed in missing:
                row = train(variant, seed, settings, options.work)
                row |= {"start_seconds": start_seconds, "date": f"{datetime.date.today()}", "load": os.getloadavg()[1]}
                row = json.loads(json.dumps(row), parse_float=lambda text: float(f"{float(text):.5g}"))
                rows.append(row)
                with options.rows.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(f"{variant.name}, seed {seed}: {row['seconds']:.0f} s", flush=True)


def run_worker(file: Path, arguments: Sequence[str]) -> int:
    """Train with the measurements around it; one rank of torchrun. Rank 0 appends their records to the file."""
    from megatron_dppo.commands.main import train_main
    from megatron_dppo.run.checkpoints import Checkpoints
    from megatron_dppo.run.step import PolicyUpdater, StepBatch
    from megatron_dppo.types import StepResult

    def write(kind: str, values: Mapping[str, Any]) -> None:
        if os.environ["RANK"] == "0":
            with file.open("a") as records:
                records.write(json.dumps({"kind": kind, **values}) + "\n")

    update = PolicyUpdater.step

    def step(updater: PolicyUpdater, batch: StepBatch, *arguments: Any, **options: Any) -> list[StepResult]:
        budget = updater.config.train.micro_batch_tokens
        has_routes = updater.config.train.needs_engine_routing
        write("paired", score_twice(updater.trainer, batch.samples, budget, has_routes=has_routes))
        return update(updater, batch, *arguments, **options)

    PolicyUpdater.step = step  # type: ignore[method-assign]
    Checkpoints.is_due = lambda self, state: False  # type: ignore[method-assign]
    measure_probe(write)
    measure_sync(write)
    sys.argv = ["megatron_dppo.train", *arguments]
    return train_main()


def score_twice(
    trainer: PolicyTrainer, samples: Sequence[TrainingSample], budget: int, *, has_routes: bool
) -> dict[str, float]:
    """Score the same samples with the trainer's own experts and, with routes, with the engine's. A collective.

    Returns:
        ``tokens`` of all ranks; for ``live`` and ``replayed`` the means over them that ``distances`` sums; ``routes``,
        the share of rows (a token in a layer) in which engine and trainer chose other experts.
    """
    from megatron_dppo.parallel.objects import all_gather_objects
    from megatron_dppo.report.metrics import reduce_metrics
    from megatron_dppo.types import Metric, select_experts
    from megatron_dppo_engines.route_checks import count_differences

    packed = trainer.pack(samples, budget)
    metrics: list[dict[str, Metric]] = []
    for label, mode in (("live", "record"), ("replayed", "replay")) if has_routes else (("live", None),):
        readings, routes = trainer.token_logprobs(packed.batches, mode)
        for i, where, number in packed.positions(samples):
            sample = samples[i]
            assert sample.rollout_logprobs is not None
            tokens = float(sample.loss_mask.sum())
            sums = distances(readings[number].logprobs[where].cpu(), sample.rollout_logprobs, sample.loss_mask)
            metrics.append({f"{label}_{name}": Metric(value, tokens) for name, value in sums.items()})
            if routes and sample.routed_experts is not None:
                shape = trainer.routing_shape
                assert shape is not None
                given = select_experts(sample.routed_experts, shape)
                live = select_experts(routes[number][where], shape)
                rows, differ = count_differences(given, live).sum(0)[0].tolist()
                metrics.append({"routes": Metric(differ, rows)})
    tokens = sum(all_gather_objects(sum(int(sample.loss_mask.sum()) for sample in samples), trainer.groups.world))
    return {"tokens": tokens, **reduce_metrics(metrics, trainer.groups.world)}


def distances(policy: Tensor, rollout: Tensor, mask: Tensor) -> dict[str, float]:
    """Sum abs(pi - mu) and the k3 estimate of KL(mu || pi) over tokens.

    Args:
        policy: log-probabilities of the trainer, ``[T]``.
        rollout: those of the engine, ``[T]``.
        mask: True where a token was sampled, ``[T]``.
    """
    ours, theirs = policy[mask].double(), rollout[mask].double()
    log_ratio = ours - theirs
    return {
        "abs_prob": float((ours.exp() - theirs.exp()).abs().sum()),
        "k3": float((log_ratio.expm1() - log_ratio).sum()),
    }


def measure_probe(write: Callable[[str, Mapping[str, Any]], None]) -> None:
    """Record the numbers of every probe that accepts a server; one that refuses it stops the run."""
    from megatron_dppo.weights import probe

    judge = probe.verify_response

    def recorded(answer: Any, expected: Any, readings: Any) -> Any:
        result = judge(answer, expected, readings)
        tokens = sum(len(generation.token_ids) for generation in answer.generations)
        distances = {"logprobs": result.logprobs, "replayed": result.replayed}
        values = {name: value and value._asdict() for name, value in distances.items()}
        write("probe", {"passed": True, "tokens": tokens, **values, "routes": result.routes})
        return result

    probe.verify_response = recorded


def measure_sync(write: Callable[[str, Mapping[str, Any]], None]) -> None:
    """Record the seconds of each sync with servers, and those of the digests in it."""
    from megatron_dppo.weights.digests import StreamDigests
    from megatron_dppo.weights.proof import SyncProof, WeightProofs
    from megatron_dppo.weights.sync import WeightSync

    seconds = dict.fromkeys(("seconds", "digests_sent", "digests_server"), 0.0)

    @contextmanager
    def clock(name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        seconds[name] += time.perf_counter() - begin
        if name == "seconds":
            write("sync", seconds)
            seconds.update(dict.fromkeys(seconds, 0.0))

    def add_clock(owner: type, method: str, name: str) -> None:
        call = getattr(owner, method)

        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with clock(name):
                return call(*args, **kwargs)

        @functools.wraps(call)
        async def timed_async(*args: Any, **kwargs: Any) -> Any:
            with clock(name):
                return await call(*args, **kwargs)

        setattr(owner, method, timed_async if inspect.iscoroutinefunction(call) else timed)

    add_clock(WeightProofs, "begin", "digests_server")
    add_clock(SyncProof, "verify", "digests_server")
    add_clock(StreamDigests, "add", "digests_sent")
    add_clock(WeightSync, "send", "seconds")


def summary(row: Row) -> dict[str, float]:
    """Return the cells of a run: means over the tokens of its paired scorings, over its steps, syncs and probes."""
    tokens = [part["tokens"] for part in row["paired"]]
    cells: dict[str, float] = {"tokens": sum(tokens)}
    for name in ("live_abs_prob", "replayed_abs_prob", "live_k3", "replayed_k3", "routes"):
        if name in row["paired"][0]:
            cells[name] = statistics.fmean([part[name] for part in row["paired"]], weights=tokens)
    for name in ("train/abs_prob_diff_first", "train/router_live_disagreement", "perf/publish_seconds"):
        if values := [step[name] for step in row["steps"] if name in step]:
            cells[name] = statistics.fmean(values)
    if row["engine"] in SERVERS:
        syncs = row["sync"]
        cells["sync, s"] = statistics.fmean(sync["seconds"] for sync in syncs)
        cells["digests, s"] = statistics.fmean(sync["digests_sent"] + sync["digests_server"] for sync in syncs)
        cells["probe"] = statistics.fmean(probe["logprobs"]["probability"] for probe in row["probe"])
    return cells


def print_table(rows: Sequence[Row]) -> None:
    """Print one line for each run as a Markdown table."""
    ordered = sorted(rows, key=lambda row: (VARIANTS.index(row_variant(row)), row["seed"]))
    lines = [(row_variant(row).name, row["seed"], summary(row)) for row in ordered]
    columns = list(dict.fromkeys(name for _, _, cells in lines for name in cells))
    print("| run | seed | " + " | ".join(columns) + " |\n" + "|---" * (len(columns) + 2) + "|")
    for name, seed, cells in lines:
        texts = [f"{cells[column]:.4g}" if column in cells else "" for column in columns]
        print(f"| {name} | {seed} | " + " | ".join(texts) + " |")


def main() -> int:
    """Run what is missing and print the table."""
    if sys.argv[1:2] == ["--worker"]:
        return run_worker(Path(sys.argv[2]), sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=list(ENGINE_SETTINGS), default=list(ENGINE_SETTINGS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--rows", type=Path, default=ROWS, help="finished runs")
    parser.add_argument("--work", type=Path, default=Path("runs/real_model_replay"), help="folder of runs and logs")
    parser.add_argument("--table", action="store_true", help="only print the table of the rows")
    options = parser.parse_args()
    options.work = options.work.resolve()
    rows = read_rows(options.rows)
    if not options.table:
        measure(options, rows)
    print_table(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())

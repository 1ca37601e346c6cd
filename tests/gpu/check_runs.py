"""Whole short runs of the trainer on the device, each a process of its own as a user starts it: what only the parts
together show. A run's numbers are compared with those of another run, or with what they must be."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tests.e2e.runs import command, environment, flags, without_timings
from tests.gpu.checks import Result, not_run

SMALL: dict[str, Any] = dict(
    parallel__expert_model_parallel_size=1,
    optimizer__lr_decay_style="constant",  # no other rate in a run of another length
    run__num_steps=2,
    rollout__prompts_per_step=4,
    rollout__samples_per_prompt=4,
    eval__every=1000,
    run__threads_per_rank=1,
    log__tensorboard="false",
    loss__entropy_coef=0.1,  # a gradient also where no reward is found
    optimizer__lr=1e-2,
)
ONE_UPDATE: dict[str, Any] = dict(rollout__dtype="fp32", train__mini_batches=1, train__epochs=1)
"""Trainer and engine have the same weights at the update."""
SECONDS = 300


REPLAY = {"train__router_replay_weights": "true"}
RUNS: dict[str, dict[str, Any]] = {
    "whole": dict(run__num_steps=4),
    "resumed": {},
    "overlapped": dict(run__num_steps=4, parallel__overlap_grad_reduce="true", parallel__overlap_param_gather="true"),
    "recorded": dict(train__router_replay="recorded", train__mini_batches=2, train__epochs=2, **REPLAY),
    "rollout": dict(train__router_replay="rollout", **REPLAY, **ONE_UPDATE),
    "compare": dict(train__router_replay="compare", **REPLAY, **ONE_UPDATE),
    "reference": dict(loss__name="minirl", loss__kl_coef=0.1, **ONE_UPDATE),
    "topk": dict(loss__name="dppo_topk_kl", loss__topk=8, **ONE_UPDATE),
    "bf16": ONE_UPDATE | dict(model__dtype="bf16", rollout__dtype="bf16"),
    "fp16": ONE_UPDATE | dict(model__dtype="fp16", rollout__dtype="fp16"),
    "ahead": dict(train__max_staleness=1, run__num_steps=3),
}
"""Settings of each run, which starts from the same weights as all others."""
CPUS = 3
"""Cores that a run is given."""
Steps = list[dict[str, Any]]


def check(device: torch.device) -> Iterator[Result]:
    """Resume, overlap, router replay, reference weights, Top-K; and that the head waits for the device nowhere."""
    with TemporaryDirectory() as place, ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // CPUS)) as pool:
        runs = {name: pool.submit(run, device, place, name, **more) for name, more in RUNS.items()}
        runs["resumed"].result()
        runs["resumed"] = pool.submit(run, device, place, "resumed", run__num_steps=4)
        steps = {name: future.result() for name, future in runs.items()}
    # The same kernels in another order of their sums on a device; none here.
    same = 1e-3 if device.type == "cuda" else 0.0
    yield Result(
        "resumed after 2 of 4 steps, largest difference to the whole run",
        difference(steps["whole"], steps["resumed"]),
        same,
    )
    yield Result(
        "overlap_grad_reduce + overlap_param_gather, the same", difference(steps["whole"], steps["overlapped"]), same
    )
    yield from check_replay(steps)
    yield from check_losses(steps, 1e-4 if device.type == "cuda" else 1e-5)
    yield from check_modes(steps)
    if device.type == "cuda":
        yield Result("places where the head waits for the device", float(head_waits(device)), 0.0)
    else:
        yield not_run("places where the head waits for the device", "CUDA (torch.cuda.set_sync_debug_mode)")


def check_replay(runs: dict[str, Steps]) -> Iterator[Result]:
    """Replayed routes are the routes of the training; live ones are compared."""
    for mode in ("recorded", "rollout", "compare"):
        steps = runs[mode]
        worst = max(step["train/router_disagreement"] for step in steps)
        missing = max(step["train/router_missing"] for step in steps)
        yield Result(f"router replay {mode}, share of other experts", worst, 0.2 if mode == "compare" else 0.0)
        yield Result(f"router replay {mode}, share of tokens without routes", missing, 0.0)
        apart = max(step["train/router_weight_diff"] for step in steps)
        yield Result(f"router replay {mode}, mean difference of the weights", apart, 0.1)


def check_losses(runs: dict[str, Steps], close: float) -> Iterator[Result]:
    """Log-probabilities of the engine, of the reference weights that are swapped in, and of Top-K sets with sums."""
    first, second = runs["reference"]
    yield Result("KL to the reference before the first update", abs(first["train/kl_penalty"]), close)
    yield Result("no KL to it after the update (0 = there is)", float(second["train/kl_penalty"] <= 1e-9), 0.0)
    steps = runs["topk"]
    for name in ("divergence_max", "abs_prob_diff", "mask_fraction"):
        # Absent where nothing was to be masked: no token of the step has an advantage.
        worst = max(
            step.get(f"train/{name}", 0.0) if name == "mask_fraction" else step[f"train/{name}"] for step in steps
        )
        yield Result(f"Top-K on-policy {name}", worst, close)
    other = max(abs(step["train/topk_other"] - step["train/topk_other_rollout"]) for step in steps)
    yield Result("Top-K mass outside the set, trainer and engine", other, close)


def check_modes(runs: dict[str, Steps]) -> Iterator[Result]:
    """bf16 and fp16 as real runs have them, and rollouts sampled beside training, with a thread of their own."""
    for dtype, bound in (("bf16", 0.01), ("fp16", 0.002)):
        worst = max(step["train/abs_prob_diff"] for step in runs[dtype])
        yield Result(f"{dtype}, mean |p - q| of engine and trainer", worst, bound)
    overflowed = sum(step["train/skipped_updates"] for step in runs["fp16"])
    yield Result("fp16, updates that overflowed", overflowed, 0.0)
    steps = runs["ahead"]
    wrong = sum(not math.isfinite(step["train/loss"]) for step in steps) + (len(steps) != 3)
    yield Result("max_staleness = 1, steps that are missing or not finite", float(wrong), 0.0)


def run(device: torch.device, place: str, name: str, **more: Any) -> list[dict[str, Any]]:
    """The records of the steps.

    Raises:
        RuntimeError: the run did not end well; with the end of its output.
    """
    folder = Path(place) / name
    values = {**SMALL, "checkpoint__save_every": 2, "run__output_dir": folder, **more}
    env = environment() | ({"CUDA_VISIBLE_DEVICES": ""} if device.type == "cpu" else {})
    done = subprocess.run(
        command(flags(**values), 1), env=env, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    print(f"runs: {name}: exit code {done.returncode}", file=sys.stderr, flush=True)
    if done.returncode:
        raise RuntimeError(f"{name}: exit code {done.returncode}: {(done.stdout + done.stderr)[-1500:]}")
    return [record for record in without_timings(folder) if "train/loss" in record]


def difference(runs: list[dict[str, Any]], others: list[dict[str, Any]]) -> float:
    """The largest one of any number of training of any step, relative where it is above 1."""
    kept = [[{k: v for k, v in r.items() if k.startswith("train/")} for r in side] for side in (runs, others)]
    if [r.keys() for r in kept[0]] != [r.keys() for r in kept[1]]:
        unlike = [sorted(a.keys() ^ b.keys()) for a, b in zip(*kept, strict=False)]
        print(f"runs: {len(kept[0])} and {len(kept[1])} steps, numbers of one alone: {unlike}", file=sys.stderr)
        return float("nan")
    pairs = [(a[k], b[k]) for a, b in zip(*kept, strict=True) for k in a]
    numbers = [(float(x), float(y)) for x, y in pairs if isinstance(x, int | float) and not math.isnan(x)]
    return max(abs(x - y) / max(1.0, abs(x)) for x, y in numbers)


def head_waits(device: torch.device) -> int:
    """1 if the fused head, forward and backward, waits for the device anywhere."""
    from tests.gpu import check_head

    list(check_head.check_whole_head("bf16", device, torch.bfloat16))  # compiles, and fills caches
    hidden = torch.randn(check_head.TOKENS, check_head.HIDDEN, device=device, requires_grad=True)
    weight = torch.randn(check_head.PADDED, check_head.HIDDEN, device=device, requires_grad=True)
    labels = torch.randint(0, check_head.VOCABULARY, (check_head.TOKENS,), device=device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = check_head.vocab_parallel_head_stats(
            *(hidden, weight, labels), group=None, vocab_size=check_head.VOCABULARY, temperature=1.0, chunk_tokens=64
        )
        result.logprobs.sum().backward()
    except RuntimeError as error:
        print(f"runs: the head waits for the device: {error}")
        return 1
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return 0

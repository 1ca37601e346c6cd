"""Lies of a real SGLang or vLLM server, each in a run of a few steps: exit code, updates before it, words.

    python -m benchmarks.lies [--engine sglang] [--dtype bf16] [--steps 4] [NAME ...]

The server is honest; a proxy changes its answers or its requests. *always*: the probe is lied to as well. *spared*: the
probe is answered rightly. The tables are those of docs/results/lies.md. Needs the environments of the engines
(make engines).
"""

from __future__ import annotations

import argparse
import copy
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.e2e.runs import records, train
from tests.engines.changes import candidates, logprobs, samples, telling
from tests.engines.inprocess import make_model
from tests.engines.proxy import Exchange, Proxy
from tests.engines.runs import from_model
from tests.engines.servers import Engine, start_sglang, start_vllm, stop_engine, wait_ready
from tests.engines.test_sampling_lies import Sampling

Change = Callable[[np.ndarray], np.ndarray]


def reported(change: Change, *, spared: bool) -> dict[str, Any]:
    """Return a proxy's lie about the sampled log-probabilities, and about the most probable token's alike."""
    but = "probe" if spared else None
    parts = [telling(logprobs(change), but=but), telling(candidates(change), but=but)]

    def lie(exchange: Exchange) -> None:
        for part in parts:
            part(exchange)

    return {"lie": lie}


def from_token(first: int, factor: float) -> Change:
    """Return a change that scales from a token of the response on."""

    def change(values: np.ndarray) -> np.ndarray:
        scaled = values.copy()
        scaled[first:] *= factor
        return scaled

    return change


def copies() -> dict[str, Any]:
    """Return a proxy that answers every prompt with the first response to it."""
    first: dict[tuple[int, ...], Any] = {}

    def lie(exchange: Exchange) -> None:
        if not samples(exchange, but="probe"):
            return
        key = tuple(exchange.request["input_ids" if exchange.path == "/generate" else "token_ids"])
        fields = exchange.answer.get("meta_info", exchange.answer)
        name = "id" if "id" in fields else "request_id"
        value = fields[name]
        exchange.answer = copy.deepcopy(first.setdefault(key, exchange.answer))
        exchange.answer.get("meta_info", exchange.answer)[name] = value

    return {"lie": lie}


LIES: dict[str, Callable[[], dict[str, Any]]] = {
    "none": dict,
    "0.1 nats lower, always": lambda: reported(lambda x: x - 0.1, spared=False),
    "0.1 nats lower, spared": lambda: reported(lambda x: x - 0.1, spared=True),
    "times .9, spared": lambda: reported(lambda x: 0.9 * x, spared=True),
    "times .7 from token 8 on, spared": lambda: reported(from_token(8, 0.7), spared=True),
    "top-p .9, always": lambda: {"before": Sampling(top_p=0.9)},
    "top-p .7, always": lambda: {"before": Sampling(top_p=0.7)},
    "min-p .3, always": lambda: {"before": Sampling(min_p=0.3)},
    "greedy, always": lambda: {"before": Sampling(top_k=1)},
    "temperature .8, always": lambda: {"before": Sampling(temperature=0.8)},
    "repetition penalty 1.5, always": lambda: {"before": Sampling(repetition_penalty=1.5)},
    "one response for all siblings": copies,
}


def start(kind: str, dtype: str, model: Path, log: Path) -> Engine:
    """Start the server that the lies are about; it may not be ready yet."""
    if kind == "sglang":
        options = ("--dtype", "bfloat16", "--enable-fp32-lm-head") if dtype == "bf16" else ()
        return start_sglang(model, log, *options, "--enable-return-routed-experts")
    return start_vllm(model, log, "--dtype", {"bf16": "bfloat16", "fp32": "float32"}[dtype])


def run(name: str, engine: Engine, model: Path, dtype: str, steps: int) -> str:
    """Return the row of one lie."""
    # vLLM on a CPU has no routed experts to replay.
    replay = "rollout" if engine.kind == "sglang" else "off"
    more = {"run__num_steps": steps, "rollout__engine": engine.kind, "train__router_replay": replay}
    with tempfile.TemporaryDirectory() as folder, Proxy(engine.url, **LIES[name]()) as proxy:
        result = train(from_model([proxy], model, Path(folder) / "run", dtype, **more))
        is_started = (Path(folder) / "run" / "metrics.jsonl").exists()
        steps_done = [r for r in records(Path(folder) / "run") if r["step"] > 0] if is_started else []
    text = result.stdout + result.stderr
    reason = re.search(rf"{re.escape(proxy.url)}: (.{{0,110}})", text.split("nothing was learned")[-1])
    difference = max((r["train/abs_prob_diff_first"] for r in steps_done), default=float("nan"))
    words = reason.group(1) if reason and result.returncode else text[-300:] if result.returncode else ""
    return f"| {name} | {result.returncode} | {len(steps_done)} | {difference:.2g} | {words} |"


def main() -> None:
    """Print one row for each lie."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(LIES))
    parser.add_argument("--engine", choices=("sglang", "vllm"), default="sglang")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    print("| lie | exit code | updates before | largest mean abs(pi - mu) of them | words |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model", seed=0, sharpness=5.0)
        engine = start(options.engine, options.dtype, model, Path(folder) / "log")
        try:
            wait_ready(engine)
            for name in options.names:
                print(run(name, engine, model, options.dtype, options.steps), flush=True)
        finally:
            stop_engine(engine)


if __name__ == "__main__":
    main()

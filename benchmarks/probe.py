"""Statistics of the probe for right and wrong servers: real servers, tiny models, one machine.

python benchmarks/probe.py OUT.json [--seeds 3]

Every server is right; each lie is put into its answer afterwards, as a gateway would. See docs/probe.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_dppo.weights.agreement import distance, missing_from_best
from megatron_dppo.weights.probe_requests import (
    ProbeError,
    ProbeExpectation,
    ProbeResponse,
    RouteCounts,
    TrainerReading,
    send_probe,
)
from megatron_dppo.weights.verdict import verify_response
from megatron_dppo_engines.server import Generation
from megatron_dppo_engines.sglang import SGLangServer
from megatron_dppo_engines.vllm import VLLMServer
from tests.engines.inprocess import build_trainer, load_weights, make_model, prepare
from tests.engines.servers import Engine, start_sglang, start_vllm, stop_engine, wait_ready
from tests.engines.tiny import ROUTING, SPECIAL, byte_tokenizer

SERVERS = {
    # name: (engine, trainer's dtype, arguments of the server)
    "fp32": ("sglang", "fp32", ("--dtype", "float32")),
    "bf16": ("sglang", "bf16", ("--dtype", "bfloat16")),
    "bf16 head fp32": ("sglang", "bf16", ("--dtype", "bfloat16", "--enable-fp32-lm-head")),
    "vllm bf16": ("vllm", "bf16", ("--dtype", "bfloat16")),
    "vllm bf16 head fp32": (
        "vllm",
        "bf16",
        ("--dtype", "bfloat16", "--hf-overrides", '{"head_dtype": "float32"}'),
    ),
}
SHARPNESS = (1.0, 5.0, 15.0)
"""Factors of the output layer: the median p of a sampled token is about .005, .5 and .99."""
TEMPERATURES = (0.7, 1.0)
TOPK = 8
TEXT = "One request before the run starts. " * 6
STEP_SIZES = (1e-6, 1e-4, 1e-3)
"""Sizes of one optimizer step: each weight moves up or down by this amount."""


@contextmanager
def server(kind: str, model: Path, folder: Path, options: tuple[str, ...]) -> Iterator[Engine]:
    """Start a real server. vLLM reports no routed experts on a CPU."""
    if kind == "sglang":
        engine = start_sglang(model, folder / "log", *options, "--enable-return-routed-experts")
    else:
        engine = start_vllm(model, folder / "log", *options)
    try:
        yield wait_ready(engine)
    finally:
        stop_engine(engine)


def probe_server(engine: Engine, folder: Path, expected: ProbeExpectation) -> ProbeResponse:
    """Load the weights of the folder into the server and return its probe response."""

    async def use() -> ProbeResponse:
        client = {"sglang": SGLangServer, "vllm": VLLMServer}[engine.kind](engine.url)
        try:
            await client.update_from_disk(str(folder), 1)
            return await send_probe(client, expected, request_id=f"probe-{os.urandom(4).hex()}")
        finally:
            await client.close()

    return asyncio.run(use())


def each(answer: ProbeResponse, change: Callable[[Generation], Generation]) -> ProbeResponse:
    """Return the response with a change applied to each generation."""
    return replace(answer, generations=tuple(change(g) for g in answer.generations))


def changed_logprobs(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Generation], Generation]:
    """Return a change of the log-probabilities of one generation."""
    return lambda g: replace(g, logprobs=torch.from_numpy(change(g.logprobs.double().numpy())).float())


def lies(readings: list[TrainerReading]) -> dict[str, Callable[[ProbeResponse], ProbeResponse]]:
    """Return corruptions of a right response by name, as a gateway could cause them.

    The raw log-probabilities are those of the trainer, with the differences of the real response.
    """
    raw = {i: r.raw_logprobs - r.logprobs for i, r in enumerate(readings)}

    def as_raw(answer: ProbeResponse) -> ProbeResponse:
        changed = tuple(
            replace(g, logprobs=(g.logprobs.double() + torch.from_numpy(raw[i])).float())
            for i, g in enumerate(answer.generations)
        )
        return replace(answer, generations=changed)

    def logprobs(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[ProbeResponse], ProbeResponse]:
        return lambda answer: each(answer, changed_logprobs(change))

    def topk(change: Callable[[Generation], dict[str, Any]]) -> Callable[[ProbeResponse], ProbeResponse]:
        return lambda answer: each(answer, lambda g: replace(g, **change(g)))

    def turned(value: torch.Tensor) -> torch.Tensor:
        return torch.cat([value[1:], value[-1:]])

    return {
        "right": lambda answer: answer,
        "raw": as_raw,
        "shifted by one": logprobs(lambda x: np.append(x[1:], x[-1])),
        "one decimal": logprobs(lambda x: np.round(x, 1)),
        "two decimals": logprobs(lambda x: np.round(x, 2)),
        "x 0.7": logprobs(lambda x: 0.7 * x),
        "top-k x 0.7": topk(lambda g: {"topk_logprobs": g.topk_logprobs * 0.7}),
        "top-k shifted": topk(
            lambda g: {"topk_logprobs": turned(g.topk_logprobs), "topk_token_ids": turned(g.topk_token_ids)}
        ),
        "top-k values shifted": topk(lambda g: {"topk_logprobs": turned(g.topk_logprobs)}),
        "routes shifted": topk(lambda g: {"routed_experts": turned(g.routed_experts)}),
        "routes permuted": topk(lambda g: {"routed_experts": g.routed_experts[torch.randperm(len(g.routed_experts))]}),
        "routes of other layers": topk(lambda g: {"routed_experts": g.routed_experts.flip(1)}),
    }


def numbers(answer: ProbeResponse, expected: ProbeExpectation, readings: list[TrainerReading]) -> dict[str, Any]:
    """Return the statistics and the verdict."""
    reported = np.concatenate([g.logprobs.double().numpy() for g in answer.generations])
    live = [r.logprobs for r in readings]
    replayed = np.concatenate([r.logprobs if r.replayed_logprobs is None else r.replayed_logprobs for r in readings])
    topk = np.concatenate([g.topk_logprobs[:, :-1].double().numpy() for g in answer.generations])
    computed, best = (np.concatenate([getattr(r, n) for r in readings]) for n in ("topk_logprobs", "best_logprobs"))
    try:
        verify_response(answer, expected, readings)
        verdict = "passes"
    except ProbeError as error:
        verdict = error.detail.partition(":")[0]
    return {
        "verdict": verdict,
        "live": distance(reported, np.concatenate(live))._asdict(),
        "replayed": distance(reported, replayed)._asdict(),
        "topk": distance(topk, computed)._asdict(),
        "below best": missing_from_best(computed, best),
        "routes": sum((r.routes for r in readings if r.routes is not None), RouteCounts()).share,
        "median p": float(np.median(np.exp(np.concatenate(live)))),
    }


def measure(name: str, folder: Path, seeds: int) -> Iterator[dict[str, Any]]:
    """Yield one record for each model, temperature and corruption."""
    from megatron_dppo.weights.probe import compute_readings

    engine_name, dtype, options = SERVERS[name]
    models = {(s, k): make_model(folder / f"{s}-{k}", s, k) for s in range(seeds) for k in SHARPNESS}
    ids = tuple(byte_tokenizer(SPECIAL).encode(TEXT))
    with server(engine_name, models[0, 1.0], folder, options) as engine:
        for temperature in TEMPERATURES:
            trainer = build_trainer(models[0, 1.0], dtype, temperature, TOPK)
            expected = ProbeExpectation(
                prompt=TEXT,
                prompt_token_ids=ids,
                vocab_size=512,
                temperature=temperature,
                dtype=dtype,
                topk_logprobs=TOPK,
                routing=ROUTING if engine_name == "sglang" else None,
            )
            for (seed, sharpness), model in models.items():
                answer = probe_server(engine, model, expected)

                def read(
                    other: ProbeResponse, trainer: Any = trainer, expected: Any = expected
                ) -> list[TrainerReading]:
                    return compute_readings(trainer, [other], expected, 4096)[0]

                common = {"server": name, "temperature": temperature, "sharpness": sharpness, "seed": seed}
                trainer.bridge.load(load_weights(model))
                for lie, corrupt in lies(read(answer)).items():
                    if "routes" in lie and expected.routing is None:
                        continue
                    corrupted = corrupt(answer)
                    yield {**common, "case": lie, **numbers(corrupted, expected, read(corrupted))}
                for size in STEP_SIZES:
                    trainer.bridge.load(load_weights(make_model(folder / "moved", seed, sharpness, size)))
                    yield {**common, "case": f"a step of {size:g} ago", **numbers(answer, expected, read(answer))}
                trainer.bridge.load(load_weights(make_model(folder / "other", seed + 100, sharpness)))
                yield {**common, "case": "another seed", **numbers(answer, expected, read(answer))}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--servers", nargs="+", default=list(SERVERS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    prepare()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1)
        records = []
        for kind in arguments.servers:
            server_folder = folder / kind.replace(" ", "-")
            server_folder.mkdir()
            records += measure(kind, server_folder, arguments.seeds)
            arguments.out.write_text(json.dumps(records))
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

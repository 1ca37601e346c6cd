"""CPU of the contract of a response, per 1,000 tokens: ``python -m benchmarks.contract``.

Answers of 1,000 tokens to prompts of 200, as the wire decoders give them: bare, with a Top-K of 20, with the routes of
a model of 48 layers and 8 of 128 experts, with both. Process time, so that other programs do not count.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from megatron_dppo.types import RoutingShape, SamplingParams, VersionSpan
from megatron_dppo_engines.server import Echo, GenerateRequest, Generation
from megatron_dppo_engines.servers.contract import Contract, check_generation

VOCAB = 151_936
TOKENS = 1000
PROMPT = 200
K = 20
SHAPE = RoutingShape(num_layers=48, num_experts=128, topk=8)
CONTRACT = Contract(vocab_size=VOCAB, end_tokens=(151_643, 151_645))
ROUNDS = 50


def answer(*, topk: bool, routed: bool) -> tuple[GenerateRequest, Generation]:
    """Return a request and a response that satisfies the contract."""
    rng = np.random.default_rng(0)
    # Decreasing log-probabilities of K distinct ids; the sampled token is one of them.
    values = -np.sort(rng.exponential(3.0, (TOKENS, K)), axis=1) - np.log(K)
    ids = np.stack([rng.permutation(10_000)[:K] for _ in range(TOKENS)])
    slot = rng.integers(0, K, TOKENS)
    sampled, logprobs = ids[np.arange(TOKENS), slot], values[np.arange(TOKENS), slot].astype(np.float32)
    prompt = tuple(int(token) for token in rng.integers(0, VOCAB, PROMPT))
    rows = PROMPT + TOKENS - 1
    routes = rng.random((rows, SHAPE.num_layers, SHAPE.num_experts)).argpartition(8, -1)[..., :8].astype(np.uint8)
    last = np.full((TOKENS, 1), -1)
    request = GenerateRequest(
        request_id="r",
        token_ids=prompt,
        params=SamplingParams(max_new_tokens=TOKENS, topk_logprobs=K if topk else 0),
        routing=SHAPE if routed else None,
    )
    return request, Generation(
        token_ids=torch.from_numpy(sampled.astype(np.int32)),
        logprobs=torch.from_numpy(logprobs),
        finish_reason="length",
        versions=(VersionSpan(1, 0, TOKENS),),
        topk_token_ids=torch.from_numpy(np.concatenate([ids, last], 1).astype(np.int32)) if topk else None,
        topk_logprobs=torch.from_numpy(np.concatenate([values, last + 1], 1).astype(np.float32)) if topk else None,
        routed_experts=torch.from_numpy(routes) if routed else None,
        echo=Echo(
            request_id="r",
            prompt_token_ids=prompt,
            prompt_length=PROMPT,
            response_length=TOKENS,
            best_token_ids=ids[:, 0].astype(np.int32),
            best_logprobs=values[:, 0].astype(np.float32),
        ),
    )


def main() -> None:
    """Print milliseconds per 1,000 tokens."""
    torch.set_num_threads(1)
    for topk, routed in ((False, False), (True, False), (False, True), (True, True)):
        request, generation = answer(topk=topk, routed=routed)
        times = []
        for _ in range(ROUNDS):
            start = time.process_time()
            check_generation(generation, request, CONTRACT, "http://s")
            times.append(time.process_time() - start)
        name = " + ".join(["bare", *(["Top-K 20"] if topk else []), *(["48 x 8 routes"] if routed else [])])
        print(f"{name:32s} {1000 * float(np.median(times)):7.3f} ms per 1,000 tokens")


if __name__ == "__main__":
    main()

"""What a rollout token costs the leader of a data-parallel rank on its way from an answer to a packed micro-batch.

    python benchmarks/data_plane.py [--responses 8] [--tokens 1000 4000] [--json FILE]

CPU microseconds a token and bytes a token by stage, one core, for answers as SGLang and vLLM send them: Top-K of 20,
the routes of a model with 48 layers and 8 of 128 experts a token. The sizes tell whether the cost is linear. At the end
the share of a step of the 30B recipe (1.57 million tokens a leader, 200 s) that this CPU time is, and of ten times
that.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from megatron_dppo.data.packing import pack
from megatron_dppo.rollout.collect import to_samples
from megatron_dppo.rollout.contract import Contract, check_generation
from megatron_dppo.rollout.http import decode_body
from megatron_dppo.rollout.response import GrowingResponse
from megatron_dppo.rollout.server import GenerateRequest
from megatron_dppo.rollout.sglang import wire as sglang
from megatron_dppo.rollout.vllm import wire as vllm
from megatron_dppo.types import Prompt, Rollout, RolloutGroup, RoutingShape, SamplingParams

T = TypeVar("T")
VOCAB, PROMPT, K = 151_936, 200, 20
SHAPE = RoutingShape(num_layers=48, num_experts=128, topk=8)
CONTRACT = Contract(vocab_size=VOCAB, end_tokens=(VOCAB - 1,))
TOKENS_A_STEP, STEP_SECONDS = 1.57e6, 200.0


class Tokenizer:
    """The text of a response costs what the tokenizer costs, which is not ours."""

    def decode(self, *_: object, **__: object) -> str:
        """No text."""
        return ""


def columns(length: int) -> dict[str, Any]:
    """What a policy could have sampled."""
    rng = np.random.default_rng(0)
    ids = np.stack([rng.permutation(VOCAB - 2)[:K] for _ in range(length)])
    values = -np.sort(rng.exponential(3.0, (length, K)), 1) - np.log(K)
    place, rows = rng.integers(0, K, length), np.arange(length)
    routes = rng.random((PROMPT + length - 1, 48, 128)).argpartition(8, -1)[..., :8]
    return {
        "prompt": rng.integers(0, VOCAB - 2, PROMPT).tolist(),
        "ids": ids,
        "values": values,
        "tokens": ids[rows, place].tolist(),
        "logprobs": values[rows, place].tolist(),
        "routes": routes,
    }


def sglang_answer(found: dict[str, Any]) -> bytes:
    """As version 0.5.23 writes it."""
    length, name = len(found["tokens"]), "output_top_logprobs"

    def packed(values: Any, dtype: str) -> str:
        return base64.b64encode(values.astype(dtype).tobytes()).decode()

    meta = {
        "id": sglang.wire_id("r"),
        "finish_reason": {"type": "length", "length": length},
        "prompt_tokens": PROMPT,
        "completion_tokens": length,
        "weight_versions": [{"version": "1", "start": 0, "end": length}],
        "output_token_logprobs": [[v, t, None] for v, t in zip(found["logprobs"], found["tokens"], strict=True)],
        "output_token_logprobs_length": length,
        f"{name}_shape": [length, K],
        f"{name}_idx_flat_b64_dtype": "int32",
        f"{name}_val_flat_b64_dtype": "float32",
        f"{name}_idx_flat_b64": packed(found["ids"], "<i4"),
        f"{name}_val_flat_b64": packed(found["values"], "<f4"),
        "routed_experts": packed(found["routes"], "<i4"),
    }
    answer = {"output_ids": found["tokens"], "prompt_token_ids": found["prompt"], "meta_info": meta}
    return json.dumps(answer).encode()


def vllm_answer(found: dict[str, Any]) -> bytes:
    """As version 0.32 writes it."""
    length = len(found["tokens"])
    file = io.BytesIO()
    np.save(file, found["routes"].astype(np.uint8))
    content = [
        {
            "token_id": token,
            "logprob": value,
            "top_logprobs": [
                {"token_id": int(i), "logprob": float(v), "rank": rank}
                for rank, (i, v) in enumerate(zip(ids, values, strict=True), 1)
            ],
        }
        for token, value, ids, values in zip(
            found["tokens"], found["logprobs"], found["ids"], found["values"], strict=True
        )
    ]
    choice = {
        "finish_reason": "length",
        "token_ids": found["tokens"],
        "weight_versions": [{"version": "1", "start": 0, "end": length}],
        "logprobs": {"content": content},
        "routed_experts": base64.b64encode(file.getvalue()).decode(),
    }
    usage = {"prompt_tokens": PROMPT, "completion_tokens": length}
    return json.dumps(
        {"request_id": "r", "prompt_token_ids": found["prompt"], "usage": usage, "choices": [choice]}
    ).encode()


ENGINES: dict[str, tuple[Callable[[dict[str, Any]], bytes], Callable[..., Any]]] = {
    "SGLang": (sglang_answer, sglang.decode_generation),
    "vLLM": (vllm_answer, vllm.decode_generation),
}


def measure(engine: str, responses: int, length: int) -> dict[str, tuple[float, float]]:
    """(CPU microseconds, bytes) a token of each stage."""
    make, decode = ENGINES[engine]
    found = columns(length)
    body = make(found)
    request = GenerateRequest(
        request_id="r",
        token_ids=tuple(found["prompt"]),
        params=SamplingParams(max_new_tokens=length, topk_logprobs=K),
        routing=SHAPE,
    )
    stages: dict[str, tuple[float, float]] = {}

    def stage(name: str, call: Callable[[], T], size: float = 0.0, times: int = responses) -> T:
        begin = time.process_time()
        for _ in range(times):
            result = call()
        stages[name] = ((time.process_time() - begin) / times / length * 1e6, size / length)
        return result

    answer = stage("JSON", lambda: decode_body(body), len(body))
    generation = stage("decode", lambda: decode(answer, request, "http://s"))
    stage("contract", lambda: check_generation(generation, request, CONTRACT, "http://s"))

    def completed() -> Any:
        response = GrowingResponse(found["prompt"], topk=K, routing=SHAPE)
        response.append_sampled(generation)
        return response.completion(generation.finish_reason, Tokenizer())

    completion = stage("response", completed)
    prompt = Prompt(prompt_id="p", text="", token_ids=tuple(found["prompt"]), label="")
    group = RolloutGroup(prompt=prompt, rollouts=(Rollout(prompt=prompt, completion=completion, reward=1.0),))
    packed = pickle.dumps(group)
    stage("to the other ranks", lambda: pickle.loads(pickle.dumps(group)), len(packed))
    (sample,) = stage("sample", lambda: to_samples([group], [[1.0]]))
    stage("micro-batch", lambda: pack([sample] * 4), times=max(1, responses // 4))
    return stages


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", type=int, default=8)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000, 4000])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = {e: {n: measure(e, options.responses, n) for n in options.tokens} for e in ENGINES}
    for engine, sizes in result.items():
        print(f"{engine:22}" + "".join(f"{n:>8} tokens       " for n in sizes))
        for name in next(iter(sizes.values())):
            cells = [f"{us:7.2f} us {size:7.0f} B   " for us, size in (stages[name] for stages in sizes.values())]
            print(f"  {name:20}" + "".join(cells))
        totals = [sum(us for us, _ in stages.values()) for stages in sizes.values()]
        print(f"  {'together':20}" + "".join(f"{us:7.2f} us              " for us in totals))
        share = totals[-1] * 1e-6 * TOKENS_A_STEP / STEP_SECONDS
        print(f"  of a 200 s step of the 30B recipe: {share:.0%}, at ten times its tokens {10 * share:.0%}\n")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Synthetic responses of SGLang and vLLM. As a program: a server that always returns one of them.

python benchmarks/made_answers.py sglang 4000     prints its port
"""

from __future__ import annotations

import base64
import io
import json
import socket
import sys
from typing import Any

import numpy as np
from aiohttp import web

from megatron_dppo.types import RoutingShape, SamplingParams
from megatron_dppo_engines.server import GenerateRequest
from megatron_dppo_engines.servers.contract import Contract
from megatron_dppo_engines.sglang import wire as sglang

VOCAB = 151_936
PROMPT = 200
K = 20
SHAPE = RoutingShape(num_layers=48, num_experts=128, topk=8)
CONTRACT = Contract(vocab_size=VOCAB, end_tokens=(VOCAB - 1,))


def columns(length: int) -> dict[str, Any]:
    """Return random columns of one response, as a policy could have sampled them."""
    rng = np.random.default_rng(0)
    ids = np.stack([rng.permutation(VOCAB - 2)[:K] for _ in range(length)])
    values = -np.sort(rng.exponential(3.0, (length, K)), 1) - np.log(K)
    slot, rows = rng.integers(0, K, length), np.arange(length)
    routes = rng.random((PROMPT + length - 1, 48, 128)).argpartition(8, -1)[..., :8]
    return {
        "prompt": rng.integers(0, VOCAB - 2, PROMPT).tolist(),
        "ids": ids,
        "values": values,
        "tokens": ids[rows, slot].tolist(),
        "logprobs": values[rows, slot].tolist(),
        "routes": routes,
    }


def sglang_answer(sampled: dict[str, Any]) -> bytes:
    """Return the response body of SGLang 0.5.23."""
    length, name = len(sampled["tokens"]), "output_top_logprobs"

    def packed(values: Any, dtype: str) -> str:
        return base64.b64encode(values.astype(dtype).tobytes()).decode()

    meta = {
        "id": sglang.wire_id("r"),
        "finish_reason": {"type": "length", "length": length},
        "prompt_tokens": PROMPT,
        "completion_tokens": length,
        "weight_versions": [{"version": "1", "start": 0, "end": length}],
        "output_token_logprobs": [[v, t, None] for v, t in zip(sampled["logprobs"], sampled["tokens"], strict=True)],
        "output_token_logprobs_length": length,
        f"{name}_shape": [length, K],
        f"{name}_idx_flat_b64_dtype": "int32",
        f"{name}_val_flat_b64_dtype": "float32",
        f"{name}_idx_flat_b64": packed(sampled["ids"], "<i4"),
        f"{name}_val_flat_b64": packed(sampled["values"], "<f4"),
        "routed_experts": packed(sampled["routes"], "<i4"),
    }
    answer = {"output_ids": sampled["tokens"], "prompt_token_ids": sampled["prompt"], "meta_info": meta}
    return json.dumps(answer).encode()


def vllm_answer(sampled: dict[str, Any]) -> bytes:
    """Return the response body of vLLM 0.32."""
    length = len(sampled["tokens"])
    file = io.BytesIO()
    np.save(file, sampled["routes"].astype(np.uint8))
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
            sampled["tokens"], sampled["logprobs"], sampled["ids"], sampled["values"], strict=True
        )
    ]
    choice = {
        "finish_reason": "length",
        "token_ids": sampled["tokens"],
        "weight_versions": [{"version": "1", "start": 0, "end": length}],
        "logprobs": {"content": content},
        "routed_experts": base64.b64encode(file.getvalue()).decode(),
    }
    usage = {"prompt_tokens": PROMPT, "completion_tokens": length}
    return json.dumps(
        {"request_id": "r", "prompt_token_ids": sampled["prompt"], "usage": usage, "choices": [choice]}
    ).encode()


MAKERS = {"sglang": sglang_answer, "vllm": vllm_answer}


def make_request(sampled: dict[str, Any]) -> GenerateRequest:
    """Return the request that the response fits."""
    return GenerateRequest(
        request_id="r",
        token_ids=tuple(sampled["prompt"]),
        params=SamplingParams(max_new_tokens=len(sampled["tokens"]), topk_logprobs=K),
        routing=SHAPE,
    )


def main() -> None:
    """Serve one response to every request."""
    body = MAKERS[sys.argv[1]](columns(int(sys.argv[2])))

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=body, content_type="application/json")

    async def info(_: web.Request) -> web.Response:
        return web.json_response({"version": "0.5.23"})

    app = web.Application()
    app.router.add_post("/generate", answer)
    app.router.add_post("/inference/v1/generate", answer)
    app.router.add_get("/server_info", info)
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    web.run_app(app, sock=listener, print=lambda *_: None)


if __name__ == "__main__":
    main()

"""Cost of our client beside a real inference server: rollout tokens per second, ours over the bare server.

    python benchmarks/rollout.py [--rounds 5] [--json FILE]

Starts SGLang on this machine (tools/engines/sglang.sh) with the tiny model of the tests. A round samples the same
prompts twice, 64 requests in flight, with log-probabilities, Top-K and routed experts, in random order: *ours* is
``ServerEngine.generate``, from prompts to checked completions; *bare* sends the same bodies over the same number of
connections and throws the bytes of the answers away, which is what the server gives by itself. The client shares the
cores with the server here, so that each second that it computes is one that the server lacks; the last line is how
many tokens one core of client takes in, by its own CPU time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from megatron_dppo.engines.server_engine import ServerEngine
from megatron_dppo.types import Prompt, SamplingParams
from megatron_dppo_engines.server import GenerateRequest
from megatron_dppo_engines.sglang import SGLangServer
from megatron_dppo_engines.sglang.wire import generate_body

REPOSITORY = Path(__file__).parents[1]
IN_FLIGHT = 64
PROMPTS = 32
SIBLINGS = 8
TOKENS = 64


def bodies(prompts: list[Prompt], params: SamplingParams, routing: Any) -> list[dict[str, Any]]:
    """Return the request bodies that ``ServerEngine`` would send."""
    requests = [
        GenerateRequest(request_id=f"bare-{i}", token_ids=p.token_ids, params=params, routing=routing)
        for i, p in enumerate(prompts)
    ]
    return [generate_body(request, flat=True) for request in requests]


async def bare(url: str, payloads: list[dict[str, Any]]) -> list[bytes]:
    """Send the bodies, ``IN_FLIGHT`` at a time, and return the raw responses."""
    slots = asyncio.Semaphore(IN_FLIGHT)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=IN_FLIGHT)) as session:

        async def one(payload: dict[str, Any]) -> bytes:
            async with slots, session.post(url + "/generate", json=payload) as answer:
                answer.raise_for_status()
                return await answer.read()

        return await asyncio.gather(*(one(payload) for payload in payloads))


def tokens_in(answers: list[bytes]) -> int:
    """Return the number of new tokens in the responses."""
    return sum(len(json.loads(answer)["output_ids"]) for answer in answers)


def timed(work: Callable[[], int]) -> tuple[float, float]:
    """Return tokens per second, and CPU seconds of this process per thousand tokens."""
    start, cpu = time.perf_counter(), time.process_time()
    count = work()
    return count / (time.perf_counter() - start), (time.process_time() - cpu) / count * 1000


def measure(url: str, folder: Path, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Measure both ways in each round."""
    from transformers import AutoConfig, AutoTokenizer

    from megatron_dppo.hf.folder import routing_shape

    hf_config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    engine = ServerEngine([SGLangServer(url)], tokenizer, hf_config, max_in_flight=IN_FLIGHT, health_seconds=10.0)
    asyncio.run(_name_version(url))
    engine.use_version(0, [url])
    params = SamplingParams(max_new_tokens=TOKENS, topk_logprobs=8, routed_experts=True)
    measured: dict[str, list[tuple[float, float]]] = {"ours": [], "bare": []}
    order = random.Random(0)
    for n in range(rounds + 1):
        prompts = [_prompt(order) for _ in range(PROMPTS)]
        repeated = [prompt for prompt in prompts for _ in range(SIBLINGS)]
        payloads = bodies(repeated, params, routing_shape(hf_config))
        answers: list[bytes] = []

        def ours(repeated: list[Prompt] = repeated) -> int:
            return sum(len(completion.token_ids) for completion in engine.generate(repeated, params))

        def plain(payloads: list[dict[str, Any]] = payloads, answers: list[bytes] = answers) -> int:
            answers += asyncio.run(bare(url, payloads))
            return len(answers) * TOKENS

        for name in order.sample(["ours", "bare"], 2):
            result = timed(ours if name == "ours" else plain)
            if name == "bare":
                share = tokens_in(answers) / (len(answers) * TOKENS)
                result = (result[0] * share, result[1] / share)
            if n:  # the first round warms up
                measured[name].append(result)
    engine.close()
    return measured


async def _name_version(url: str) -> None:
    server = SGLangServer(url)
    await server.pause()
    await server.begin_update()
    await server.end_update(0)
    await server.resume()
    await server.close()


def _prompt(order: random.Random) -> Prompt:
    tokens = tuple(order.randrange(3, 250) for _ in range(100))
    return Prompt(prompt_id=str(order.random()), text="", token_ids=tokens, label="")


def main() -> int:
    """Start the server and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()
    sys.path.insert(0, str(REPOSITORY))
    from tests.engines.servers import start_sglang, stop_engine, wait_ready
    from tests.engines.tiny import make_tiny

    with tempfile.TemporaryDirectory() as temporary:
        folder = make_tiny(Path(temporary) / "model", seed=0)
        server = start_sglang(folder, Path(temporary) / "server.log", "--enable-return-routed-experts")
        try:
            wait_ready(server)
            measured = measure(server.url, folder, options.rounds)
        finally:
            stop_engine(server)
    ratios = [o / b for (o, _), (b, _) in zip(measured["ours"], measured["bare"], strict=True)]
    for name, values in measured.items():
        speed, cost = (statistics.median(column) for column in zip(*values, strict=True))
        print(f"{name:<6}{speed:>8.0f} tokens/s {cost * 1000:>8.1f} ms of client CPU a thousand tokens")
    middle = statistics.median(ratios)
    print(f"ours / bare, paired: {middle:.3f} ({min(ratios):.3f}..{max(ratios):.3f}), goal 0.95")
    alone = 1000 / statistics.median(cost for _, cost in measured["ours"])
    print(f"one core of client alone: {alone:,.0f} tokens/s")
    if options.json:
        options.json.write_text(json.dumps({"rounds": measured, "ratio": middle, "client_tokens_per_second": alone}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

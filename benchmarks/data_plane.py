"""CPU cost of a rollout token on the leader of a data-parallel rank, from the response to a packed micro-batch.

    python benchmarks/data_plane.py [--responses 32] [--tokens 1000 4000] [--json FILE]

CPU microseconds a token by stage, for answers as SGLang and vLLM send them: Top-K of 20, the routes of a model with 48
layers and 8 of 128 experts a token. The first stages run in a process that reads answers, beside the trainer; the
others in the trainer's. A server in a process of its own gives the answers over HTTP. The sizes tell whether the cost
is linear. Then the memory that the trainer's process has more while it holds a step's responses, as groups, as samples
and as micro-batches, and the share of a step of the 30B recipe (1.57 million tokens a leader, 200 s) that the CPU time
is, and of ten times that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from made_answers import CONTRACT, MAKERS, SHAPE, K, columns, make_request

from megatron_dppo.data.replayed_routes import with_all_routes
from megatron_dppo.data.training_samples import pack, to_samples
from megatron_dppo.engines.client_processes import ClientProcesses, ClientProcessSettings
from megatron_dppo.parallel.objects import from_message, to_message
from megatron_dppo.rollout.response import GrowingResponse
from megatron_dppo.types import MicroBatches, Prompt, Rollout, RolloutGroup, SamplingParams
from megatron_dppo.types.token_columns import requested_columns
from megatron_dppo_engines.server import Generation
from megatron_dppo_engines.servers.contract import check_generation
from megatron_dppo_engines.servers.http import Deadlines, decode_body
from megatron_dppo_engines.sglang import wire as sglang
from megatron_dppo_engines.vllm import wire as vllm

T = TypeVar("T")
TOKENS_A_STEP, STEP_SECONDS = 1.57e6, 200.0
DECODERS = {"sglang": sglang.decode_generation, "vllm": vllm.decode_generation}
TRAINER = ("receive", "response", "to the other ranks", "sample", "micro-batch")


class Tokenizer:
    """Tokenizer without a cost: decoding is not part of the measurement."""

    def decode(self, *_: object, **__: object) -> str:
        """Return no text."""
        return ""


@contextmanager
def serving(engine: str, length: int) -> Any:
    """Start a server that always returns one response, and yield its URL."""
    program = [sys.executable, str(Path(__file__).with_name("made_answers.py")), engine, str(length)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


async def received(engine: str, url: str, request: Any, count: int) -> tuple[list[Generation], float]:
    """Receive ``count`` responses through a reader process, four at a time; also return this process's CPU seconds."""
    settings = ClientProcessSettings(engine=engine, urls=[url], api_key=None, deadlines=Deadlines(), contract=CONTRACT)  # type: ignore[arg-type]
    clients, server = ClientProcesses(1, settings), SimpleNamespace(url=url)
    await clients.generate(server, request)  # type: ignore[arg-type]
    generations: list[Generation] = []
    begin = time.process_time()
    for _ in range(count // 4):
        generations += await asyncio.gather(*(clients.generate(server, request) for _ in range(4)))  # type: ignore[arg-type]
    seconds = time.process_time() - begin
    await clients.close()
    return generations, seconds


def resident() -> int:
    """Return the resident bytes of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Stages:
    """CPU microseconds a token, by stage."""

    def __init__(self, length: int) -> None:
        self._length = length
        self.microseconds: dict[str, float] = {}

    def run(self, name: str, call: Callable[[], T], responses: int = 1) -> T:
        """Run and time a call that handles ``responses`` responses, and return its result."""
        begin = time.process_time()
        result = call()
        self.microseconds[name] = (time.process_time() - begin) / responses / self._length * 1e6
        return result


def to_groups(generations: Sequence[Generation], prompt: Prompt) -> list[RolloutGroup]:
    """Return one group for each generation."""
    groups = []
    columns = requested_columns(SamplingParams(max_new_tokens=1, topk_logprobs=K))
    for generation in generations:
        response = GrowingResponse(prompt.token_ids, routing=SHAPE, columns=columns)
        response.append_sampled(generation)
        completion = response.completion(generation.finish_reason, Tokenizer())
        groups.append(
            RolloutGroup(prompt=prompt, rollouts=(Rollout(prompt=prompt, completion=completion, reward=1.0),))
        )
    return groups


def read_answers(engine: str, length: int, stages: Stages) -> None:
    """Run the stages of the process that reads responses."""
    sampled = columns(length)
    body = MAKERS[engine](sampled)
    request = make_request(sampled)
    decode = DECODERS[engine]
    for _ in range(2):  # the first time is a warm-up
        answer = stages.run("JSON", lambda: decode_body(body))
        generation = stages.run("decode", partial(decode, answer, request, "http://s"))
        stages.run("contract", partial(check_generation, generation, request, CONTRACT, "http://s"))


def measure(engine: str, count: int, length: int) -> tuple[dict[str, float], float]:
    """Return CPU microseconds per token by stage, and bytes held per token. Runs in a separate process."""
    torch.set_num_threads(1)
    stages, request = Stages(length), make_request(columns(length))
    prompt = Prompt(prompt_id="p", text="", token_ids=request.token_ids, label="")

    def packed() -> None:
        for batch in MicroBatches(count // 4, lambda i: pack(samples[4 * i : 4 * i + 4])):
            assert batch.routed_experts is not None

    with serving(engine, length) as url:
        asyncio.run(received(engine, url, request, 4))
        before = resident()
        generations, seconds = asyncio.run(received(engine, url, request, count))
    stages.microseconds["receive"] = seconds / count / length * 1e6
    groups = stages.run("response", partial(to_groups, generations, prompt), count)
    generations.clear()
    samples = stages.run("sample", lambda: with_all_routes(to_samples(groups, [[1.0]] * count), SHAPE), count)
    stages.run("micro-batch", packed, count)
    held = (resident() - before) / count / length
    stages.run("to the other ranks", lambda: from_message(to_message(groups[0])))
    read_answers(engine, length, stages)
    return stages.microseconds, held


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", type=int, default=32)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000, 4000])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        result = {
            e: {n: pool.submit(measure, e, options.responses, n).result() for n in options.tokens} for e in MAKERS
        }
    for engine, by_size in result.items():
        print(f"{engine:22}" + "".join(f"{n:>8} tokens" for n in by_size))
        measured = list(by_size.values())
        for names, title in ((("JSON", "decode", "contract"), "reading process"), (TRAINER, "trainer's process")):
            for name in names:
                print(f"  {name:20}" + "".join(f"{stages[name]:12.2f} us" for stages, _ in measured))
            totals = [sum(stages[name] for name in names) for stages, _ in measured]
            print(f"  {title:20}" + "".join(f"{total:12.2f} us" for total in totals))
            share = totals[-1] * 1e-6 * TOKENS_A_STEP / STEP_SECONDS
            print(f"  {'of a 30B step':20}{share:12.1%}, at ten times its tokens {10 * share:.0%}")
        print(f"  {'held by the trainer':20}" + "".join(f"{held:12.0f} B " for _, held in measured) + "\n")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Combinations of policies over a real server whose weights change beneath running requests: each number that would
train is that of the weights that it is said to be of, and nothing sampled is lost in a checkpoint."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from transformers import AutoConfig

from megatron_dppo.engines.client_processes import ClientProcesses, ClientProcessSettings
from megatron_dppo.engines.server_engine import ServerEngine, build_contract
from megatron_dppo.rollout.saved import load_rollouts
from megatron_dppo.types import Prompt
from megatron_dppo_engines.servers.http import Deadlines
from megatron_dppo_engines.sglang import SGLangServer
from tests.engines.servers import Engine
from tests.engines.tiny import SPECIAL, Reference, byte_tokenizer
from tests.unit.combinations import STEPS, Combination, Loop, combinations, with_tool

LIMIT = 60
EVERY = combinations(servers=True)
CHOSEN = EVERY if os.environ.get("EVERYTHING") else EVERY[9::17]
"""CI takes six of 104, with 51 of the 73 pairs of policies; ``make test-matrix`` takes all."""


def prompt_at(position: int) -> Prompt:
    return Prompt(prompt_id=str(position), text="", token_ids=(20 + position % 5, 30, *[40] * (position % 3)), label="")


class Server:
    """A server and one engine over it, as a run has them."""

    def __init__(
        self, engine: Engine, models: tuple[Reference, Reference], function: Any, max_in_flight: int, processes: int
    ) -> None:
        self._models = models
        limits = Deadlines(connect=2, alive=30, control=60, update=120, generate=120)
        self._client = SGLangServer(engine.url, deadlines=limits)
        hf_config, tokenizer = AutoConfig.from_pretrained(models[0].folder), byte_tokenizer(SPECIAL)
        settings = ClientProcessSettings(
            engine="sglang",
            urls=[engine.url],
            api_key=None,
            deadlines=limits,
            contract=build_contract(hf_config, tokenizer),
        )
        self.engine = ServerEngine(
            [self._client],
            tokenizer,
            hf_config,
            max_in_flight=max_in_flight,
            health_seconds=1,
            function=function,
            client_processes=ClientProcesses(processes, settings) if processes else None,
        )

    def publish(self, version: int) -> None:
        """A weight sync: the weights of even versions are those of one model, of odd ones those of another."""

        async def update() -> None:
            await self._client.pause()
            await self._client.update_from_disk(str(self._models[version % 2].folder), version)
            await self._client.resume()

        self.engine.pause()
        self.engine.run(update())
        self.engine.use_version(version, [self._client.url])


@pytest.fixture
def start(sglang: Engine, old_model: Reference, new_model: Reference) -> Iterator[Any]:
    models, made = (old_model, new_model), []

    def reference(version: int, prompt: tuple[int, ...], response: tuple[int, ...]) -> Tensor:
        return models[version % 2].distributions(prompt, response, 1.0)

    def begin(combination: Combination, limit: int = LIMIT, max_in_flight: int = 64, processes: int = 0) -> Loop:
        server = Server(sglang, models, with_tool if combination.turns else None, max_in_flight, processes)
        loop = Loop(combination, server.engine, "sglang", prompt_at, server.publish, reference, limit)
        made.append(loop)
        return loop

    yield begin
    for loop in made:
        loop.engine.close()
        loop.stream.close()


@pytest.mark.parametrize("combination", CHOSEN, ids=str)
def test_every_token_has_the_version_that_sampled_it(start: Any, combination: Combination, tmp_path: Path) -> None:
    loop = start(combination)
    collected = list(loop.steps(STEPS // 2))
    loop.save(tmp_path / "saved")
    other = start(combination)
    other.resume(loop, tmp_path / "saved")
    list(loop.steps(STEPS))  # a checkpoint does not disturb the run that writes it
    collected += other.steps(STEPS)
    other.check_prompts(collected)


def wait_for_tokens(loop: Loop) -> None:
    """Wait until two running responses have tokens: on a busy machine they may have just begun."""
    end = time.monotonic() + 60
    while sum(len(state.token_ids) > 0 for group in loop.engine.unfinished().values() for state in group) < 2:
        assert time.monotonic() < end, "no two responses are under way"
        time.sleep(0.5)


def test_running_responses_continue_with_new_weights_and_keep_their_tokens_after_a_restart(
    start: Any, tmp_path: Path
) -> None:
    combination = Combination("exact", dynamic=False, staleness=2, turns=False, evaluation=False)
    loop = start(
        combination, 500, max_in_flight=4, processes=2
    )  # those of later steps begin when those of the first are complete
    collected = list(loop.steps(1))
    wait_for_tokens(loop)
    loop.save(tmp_path / "saved")
    contents = load_rollouts(loop.saved, 1, 0, tmp_path / "saved", prompt_at)
    had = {
        (position, i): state.token_ids.tolist()
        for position, stored in contents.items()
        if isinstance(stored.content, tuple)
        for i, state in enumerate(stored.content)
    }
    assert sum(len(tokens) > 0 for tokens in had.values()) > 1, "nothing was under way"
    other = start(combination, 500, processes=1)
    other.resume(loop, tmp_path / "saved")
    collected += other.steps(STEPS)
    later = {
        (int(group.prompt.prompt_id), i): rollout.completion
        for each in collected
        for group in each.groups
        for i, rollout in enumerate(group.rollouts)
    }
    assert all(later[key].token_ids[: len(tokens)].tolist() == tokens for key, tokens in had.items())
    assert max(len(completion.policy_versions) for completion in later.values()) > 1
    assert max(age for each in collected for age in each.ages) == 2
    other.check_prompts(collected)

"""Servers that release their memory and take it again, as they answer on a CPU: the calls, their states and their order
are real there, and nothing is freed."""

from __future__ import annotations

import asyncio
from pathlib import Path

from megatron_dppo_engines.server import InferenceServer
from tests.e2e.runs import step_records, train
from tests.engines.calls import SHORT, ask, call
from tests.engines.proxy import Exchange, Proxy
from tests.engines.runs import arguments
from tests.engines.servers import Engine
from tests.engines.tiny import Reference
from tests.engines.updates import by_handle, from_disk, off

_CLOSE = 1e-4


def check_turns(engine: Engine, new_model: Reference) -> None:
    """Each ``call`` is a trainer of its own: what it knows of the server dies with it."""

    async def lend(server: InferenceServer) -> None:
        await server.info()
        running = asyncio.create_task(server.generate(ask(SHORT, 2000, temperature=0)))  # which does not end by itself
        await asyncio.sleep(0.4)
        await server.release_memory()
        assert (await running).finish_reason == "abort"
        await server.release_memory()  # a second time SGLang would end of
        assert (await server.info()).policy_version == -1
        assert await server.alive() and await server.health()

    async def next_trainer(server: InferenceServer) -> None:
        waiting = asyncio.create_task(server.generate(ask(SHORT, 12)))
        await server.pause()
        await server.wake_weights()
        await asyncio.sleep(0.5)
        assert not waiting.done()
        waiting.cancel()
        await by_handle(server, new_model, 7)
        await server.resume()
        answer = await server.generate(ask(SHORT, 12))
        assert [span.policy_version for span in answer.versions] == [7]
        assert off(new_model, answer, SHORT) < _CLOSE

    async def die_in_a_sync(server: InferenceServer) -> None:
        await server.release_memory()
        await server.pause()
        await server.wake_weights()
        await server.begin_update()
        assert (await server.info()).policy_version == -1

    async def after_that(server: InferenceServer) -> None:
        await server.release_memory()  # of weights that have memory and a cache that has none
        await server.pause()
        await server.wake_weights()
        await from_disk(server, new_model, 8)
        await server.resume()
        answer = await server.generate(ask(SHORT, 12))
        assert [span.policy_version for span in answer.versions] == [8]
        assert off(new_model, answer, SHORT) < _CLOSE

    for trainer in (lend, next_trainer, die_in_a_sync, after_that):
        call(engine, trainer)


def test_an_sglang_server_shares_memory_in_turns_after_any_crash(sglang: Engine, new_model: Reference) -> None:
    check_turns(sglang, new_model)


def test_a_vllm_server_shares_memory_in_turns_after_any_crash(vllm: Engine, new_model: Reference) -> None:
    check_turns(vllm, new_model)


def give_back(engine: Engine, model: Reference) -> None:
    """Awake, with the weights that the tests of other files begin with."""

    async def wake(server: InferenceServer) -> None:
        await server.pause()
        await server.wake_weights()
        await server.update_from_disk(str(model.folder), -1)
        await server.resume()

    call(engine, wake)


_NAMES = {
    "/sleep": "release",
    "/wake_up": "wake",
    "/finish_weight_update": "weights are there",
    "/resume": "go on",
    "/inference/v1/generate": "generate",
}
_TURN = ["wake", "weights are there", "wake", "go on", "generate", "release"]


def test_a_colocated_run_alternates_with_its_server_and_the_next_run_wakes_it(
    vllm: Engine, old_model: Reference, tmp_path: Path
) -> None:
    calls: list[str] = []
    give_back(vllm, old_model)

    async def note(exchange: Exchange) -> bool:
        name = _NAMES.get(exchange.path)
        if name is not None and calls[-1:] != [name]:
            calls.append(name)
        return True

    with Proxy(vllm.url, before=note) as proxy:
        for steps in (2, 3):  # the second run goes on from the first one's checkpoint
            more = {
                "rollout__engine": "vllm",
                "rollout__servers__colocated": "true",
                "rollout__weight_sync__method": "ipc",
                "model__path": old_model.folder,
                "parallel__expert_model_parallel_size": 1,
                "train__router_replay": "off",
                "train__mini_batches": 1,
                "rollout__prompts_per_step": 2,
                "rollout__samples_per_prompt": 4,
                "rollout__max_new_tokens": 16,
                "eval__max_prompts": 2,
                "checkpoint__export_hf": "false",
                "run__num_steps": steps,
                "eval__every": 2,
                "checkpoint__save_every": 1,
                "checkpoint__accept_changes": "true",  # of run.num_steps
            }
            result = train(arguments([proxy], tmp_path / "run", **more), processes=1)
            assert result.returncode == 0, result.stdout + result.stderr
    give_back(vllm, old_model)
    records = step_records(tmp_path / "run")
    assert len(records) == 3 and all(record["train/abs_prob_diff"] < 1e-5 for record in records)
    # Three turns with the evaluation after the last step, whose save ends it; the server stays asleep, and is woken for
    # the next run's publish and for its evaluation.
    assert calls == ["release"] + 5 * _TURN, calls

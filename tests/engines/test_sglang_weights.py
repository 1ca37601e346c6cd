"""Each way of giving a server new weights, on both generations of its protocol."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from megatron_dppo.errors import CheckpointError, ServerError
from megatron_dppo.types import VersionSpan
from megatron_dppo_engines.server import Generation, InferenceServer, transfer_group_name
from megatron_dppo_engines.serving.checks import fetch_versions
from tests.engines.calls import LONG, SHORT, ask, call
from tests.engines.servers import Engine, free_port
from tests.engines.tiny import Reference, difference
from tests.engines.updates import Update, by_broadcast, by_handle, from_disk, off, receive, vanishing_trainer


@pytest.fixture
def sglang(sglang_server: Engine, old_model: Reference) -> Engine:
    """The server with the old weights as version 0."""
    call(sglang_server, lambda server: server.update_from_disk(str(old_model.folder), 0))
    return sglang_server


@pytest.mark.parametrize("update", [from_disk, by_handle, by_broadcast])
def test_after_an_update_only_the_new_weights_sample_even_for_a_cached_prompt(
    sglang: Engine, old_model: Reference, new_model: Reference, update: Update
) -> None:
    async def use(server: InferenceServer) -> None:
        before = await server.generate(ask(LONG, 30))
        assert off(old_model, before, LONG) < 1e-5 < 0.1 < off(new_model, before, LONG)
        old_sum = await server.weight_digests()
        await server.pause()
        await update(server, new_model, 7)
        await server.resume()
        after = await server.generate(ask(LONG, 30))
        assert off(new_model, after, LONG) < 1e-5
        assert after.versions == (VersionSpan(7, 0, len(after.token_ids)),)
        assert (await server.info()).policy_version == 7
        assert await server.weight_digests() != old_sum
        await server.update_from_disk(str(old_model.folder), 8)
        assert await server.weight_digests() == old_sum

    call(sglang, use)


def test_each_token_of_a_running_request_has_the_version_that_sampled_it(
    sglang: Engine, old_model: Reference, new_model: Reference
) -> None:
    aborts = call(sglang, lambda server: server.info()).engine_version == "0.5.20"

    async def use(server: InferenceServer) -> Generation:
        running = asyncio.create_task(server.generate(ask(SHORT, 400)))
        await asyncio.sleep(0.1)
        await server.pause()
        await by_handle(server, new_model, 1)
        await server.resume()
        return await running

    for _ in range(8):  # a random response may end by itself
        answer = call(sglang, use)
        if len(answer.versions) == 2 or answer.finish_reason == "abort":
            break
        call(sglang, lambda server: server.update_from_disk(str(old_model.folder), 0))
    length = len(answer.token_ids)
    if aborts:  # it cannot drop its caches while a request waits
        edge = length
        assert answer.finish_reason == "abort" and answer.versions == (VersionSpan(0, 0, length),)
    else:
        edge = answer.versions[0].end
        assert answer.versions == (VersionSpan(0, 0, edge), VersionSpan(1, edge, length))
    logprobs = answer.logprobs
    old, new = (m.logprobs(SHORT, answer.token_ids.tolist(), 1.0) for m in (old_model, new_model))
    assert difference(logprobs[:edge], old[:edge]) < 1e-5
    assert difference(logprobs[edge:], new[edge:]) < 1e-5


def test_a_missing_folder_is_an_error_and_the_old_weights_stay(
    sglang: Engine, old_model: Reference, tmp_path: Path
) -> None:
    async def use(server: InferenceServer) -> None:
        with pytest.raises(ServerError, match=r"nowhere.*version '0'"):
            await server.update_from_disk(str(tmp_path / "nowhere"), 1)
        answer = await server.generate(ask(SHORT, 20))
        assert answer.versions[0].policy_version == 0
        assert off(old_model, answer, SHORT) < 1e-5

    call(sglang, use)


def test_an_unfinished_update_leaves_no_valid_version_and_can_be_restarted(
    sglang: Engine, new_model: Reference
) -> None:
    async def dies(server: InferenceServer) -> None:
        await server.pause()
        await server.begin_update()
        await receive(server, list(new_model.weights())[:5])

    async def comes_back(server: InferenceServer) -> None:
        assert (await server.info()).policy_version == -1
        await server.pause()
        assert await server.health()
        await by_handle(server, new_model, 3)
        await server.resume()
        answer = await server.generate(ask(SHORT, 20))
        assert answer.versions[0].policy_version == 3 and off(new_model, answer, SHORT) < 1e-5

    call(sglang, dies)
    call(sglang, comes_back)


def test_a_server_on_a_cpu_has_no_nccl_to_compare(sglang: Engine) -> None:
    assert fetch_versions(sglang.url, "sglang", None, 30.0).nccl is None


def test_an_update_without_a_pause_is_rejected(sglang: Engine) -> None:
    with pytest.raises(RuntimeError, match="begin_update without pause"):
        call(sglang, lambda server: server.begin_update())


def test_a_paused_server_leaves_its_core_to_the_trainer(sglang: Engine) -> None:
    def cpu_seconds() -> float:
        program = psutil.Process(sglang.process.pid)
        return sum(sum(each.cpu_times()[:2]) for each in (program, *program.children(recursive=True)))

    async def use(server: InferenceServer) -> None:
        await server.pause()
        before = cpu_seconds()
        await asyncio.sleep(1)
        used = cpu_seconds() - before
        await server.resume()
        assert used < 0.4, used  # a scheduler that polls without a rest uses 1

    call(sglang, use)


def test_a_paused_request_can_be_aborted(sglang: Engine, old_model: Reference) -> None:
    async def use(server: InferenceServer) -> Generation:
        running = asyncio.create_task(server.generate(ask(SHORT, 1000)))
        await asyncio.sleep(0.5)
        await server.pause()
        await server.abort()
        await server.resume()
        return await running

    answer = call(sglang, use)
    assert answer.finish_reason in ("abort", "stop", "length")
    assert not len(answer.token_ids) or off(old_model, answer, SHORT) < 1e-5


def test_a_trainer_that_leaves_the_group_leaves_a_server_that_can_be_updated(
    sglang: Engine, new_model: Reference
) -> None:
    async def use(server: InferenceServer) -> None:
        port = free_port()
        joined = asyncio.create_task(server.join_group("127.0.0.1", port, 1, 2, "gloo"))
        trainer = vanishing_trainer("127.0.0.1", port, transfer_group_name("127.0.0.1", port))
        await joined
        await server.pause()
        await server.begin_update()
        received = asyncio.create_task(server.receive_broadcast(["model.norm.weight"], ["float32"], [[64]]))
        await asyncio.sleep(0.3)
        trainer.kill()
        trainer.wait()
        with pytest.raises(ServerError, match=r"Failed to (receive|update)"):
            await received
        assert (await server.info()).policy_version == -1
        await by_broadcast(server, new_model, 5)
        await server.resume()
        answer = await server.generate(ask(SHORT, 20))
        assert answer.versions[0].policy_version == 5 and off(new_model, answer, SHORT) < 1e-5

    call(sglang, use)


def test_an_incomplete_folder_is_rejected_before_the_server_is_called(
    sglang: Engine, old_model: Reference, new_model: Reference, tmp_path: Path
) -> None:
    """SGLang 0.5.23 dies of such a folder."""
    for file in new_model.folder.iterdir():
        content = file.read_bytes()
        (tmp_path / file.name).write_bytes(content[: len(content) // 2] if file.suffix == ".safetensors" else content)

    async def use(server: InferenceServer) -> None:
        with pytest.raises(CheckpointError, match=r"model\.safetensors .*readable"):
            await server.update_from_disk(str(tmp_path), 1)
        answer = await server.generate(ask(SHORT, 20))
        assert answer.versions[0].policy_version == 0 and off(old_model, answer, SHORT) < 1e-5

    call(sglang, use)

"""Each way of giving a vLLM server new weights."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.errors import CheckpointError, ServerError
from megatron_dppo.setup.server_checks import required_server_features
from megatron_dppo.types import VersionSpan
from megatron_dppo.weights.transfer_group import flatten_bucket
from megatron_dppo_doctor.doctor.servers import inspect_servers
from megatron_dppo_engines.server import Generation, InferenceServer, transfer_group_name
from megatron_dppo_engines.serving.checks import fetch_versions
from megatron_dppo_engines.shared_memory import DeviceHandle, SharedBucket
from tests.engines.calls import LONG, SHORT, ask, call
from tests.engines.servers import Engine, free_port
from tests.engines.tiny import Reference, difference
from tests.engines.updates import Update, by_broadcast, by_handle, from_disk, off, receive, vanishing_trainer
from tests.unit import configs


@pytest.fixture
def vllm(vllm_server: Engine, old_model: Reference) -> Engine:
    """The server with the old weights as version 0."""
    call(vllm_server, lambda server: server.update_from_disk(str(old_model.folder), 0))
    return vllm_server


@pytest.mark.parametrize("update", [from_disk, by_handle, by_broadcast])
def test_after_an_update_only_the_new_weights_sample_even_for_a_cached_prompt(
    vllm: Engine, old_model: Reference, new_model: Reference, update: Update
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

    call(vllm, use)


@pytest.mark.parametrize(
    "name", ["model.layers.1.self_attn.o_proj.weight", "model.layers.0.mlp.experts.3.up_proj.weight"]
)
def test_the_checksum_detects_a_change_of_one_packed_tensor(vllm: Engine, old_model: Reference, name: str) -> None:
    changed = {n: w.clone() for n, w in old_model.weights()}
    changed[name][0, 0] += 0.01

    async def use(server: InferenceServer) -> None:
        before = await server.weight_digests()
        await server.pause()
        for version, weights in ((1, changed.items()), (2, old_model.weights())):
            await server.begin_update()
            await receive(server, list(weights))
            await server.end_update(version)
            assert (await server.weight_digests() == before) == (version == 2)
        await server.resume()

    call(vllm, use)


def test_each_token_of_a_running_request_has_the_version_that_sampled_it(
    vllm: Engine, old_model: Reference, new_model: Reference
) -> None:
    async def use(server: InferenceServer) -> Generation:
        running = asyncio.create_task(server.generate(ask(SHORT, 400)))
        await asyncio.sleep(0.1)
        await server.pause()
        await by_handle(server, new_model, 1)
        await server.resume()
        return await running

    for _ in range(8):  # a random response may end by itself
        answer = call(vllm, use)
        if len(answer.versions) == 2:
            break
        call(vllm, lambda server: server.update_from_disk(str(old_model.folder), 0))
    length, edge = len(answer.token_ids), answer.versions[0].end
    assert answer.versions == (VersionSpan(0, 0, edge), VersionSpan(1, edge, length))
    logprobs = answer.logprobs
    old, new = (m.logprobs(SHORT, answer.token_ids.tolist(), 1.0) for m in (old_model, new_model))
    assert difference(logprobs[:edge], old[:edge]) < 1e-5
    assert difference(logprobs[edge:], new[edge:]) < 1e-5


def test_a_missing_folder_is_an_error_and_the_old_weights_stay(
    vllm: Engine, old_model: Reference, tmp_path: Path
) -> None:
    async def use(server: InferenceServer) -> None:
        with pytest.raises(ServerError, match=r"nowhere.*version '0'"):
            await server.update_from_disk(str(tmp_path / "nowhere"), 1)
        answer = await server.generate(ask(SHORT, 20))
        assert answer.versions[0].policy_version == 0
        assert off(old_model, answer, SHORT) < 1e-5

    call(vllm, use)


def test_an_incomplete_folder_is_rejected_before_the_server_is_called(
    vllm: Engine, old_model: Reference, new_model: Reference, tmp_path: Path
) -> None:
    for file in new_model.folder.iterdir():
        content = file.read_bytes()
        (tmp_path / file.name).write_bytes(content[: len(content) // 2] if file.suffix == ".safetensors" else content)

    async def use(server: InferenceServer) -> None:
        with pytest.raises(CheckpointError, match=r"model\.safetensors .*readable"):
            await server.update_from_disk(str(tmp_path), 1)
        answer = await server.generate(ask(SHORT, 20))
        assert answer.versions[0].policy_version == 0 and off(old_model, answer, SHORT) < 1e-5

    call(vllm, use)


@pytest.mark.parametrize("update", [by_handle, from_disk])
def test_an_unfinished_update_leaves_no_valid_version_and_the_next_update_restores_it(
    vllm: Engine, new_model: Reference, update: Update
) -> None:
    async def dies(server: InferenceServer) -> None:
        await server.pause()
        await server.begin_update()
        await receive(server, [(n, w * 0) for n, w in new_model.weights() if "o_proj" not in n][:20])

    async def comes_back(server: InferenceServer) -> None:
        assert (await server.info()).policy_version == -1
        await server.pause()
        assert await server.health()
        await update(server, new_model, 3)
        await server.resume()
        answer = await server.generate(ask(SHORT, 20))
        assert answer.versions[0].policy_version == 3 and off(new_model, answer, SHORT) < 1e-5

    call(vllm, dies)
    call(vllm, comes_back)


def test_a_server_resumed_during_an_update_survives_and_its_tokens_have_no_valid_version(
    vllm: Engine, new_model: Reference
) -> None:
    async def use(server: InferenceServer) -> None:
        await server.pause()
        await server.begin_update()
        await receive(server, list(new_model.weights())[:20])
        await server.resume()
        answer = await server.generate(ask(SHORT, 20))
        assert answer.versions[0].policy_version == -1 and len(answer.token_ids)

    call(vllm, use)


def test_a_tensor_with_a_wrong_shape_is_an_error_after_which_the_server_can_be_updated(
    vllm: Engine, new_model: Reference
) -> None:
    async def use(server: InferenceServer) -> None:
        await server.pause()
        await server.begin_update()
        await receive(server, list(new_model.weights())[:20])
        with pytest.raises(ServerError, match=r"update_weights: HTTP 500"):
            await receive(server, [("model.layers.0.self_attn.q_proj.weight", torch.zeros(3, 3))])
        await server.resume()
        assert (await server.generate(ask(SHORT, 20))).versions[0].policy_version == -1
        await server.pause()
        await by_handle(server, new_model, 6)
        await server.resume()
        answer = await server.generate(ask(SHORT, 20))
        assert answer.versions[0].policy_version == 6 and off(new_model, answer, SHORT) < 1e-5

    call(vllm, use)


def test_missing_or_foreign_device_memory_is_an_error_after_which_the_server_can_be_updated(
    vllm: Engine, new_model: Reference
) -> None:
    bucket = flatten_bucket(list(new_model.weights())[:9])
    gone = SharedBucket(bucket.data, readers=1)
    gone.free(taken=False)
    elsewhere = DeviceHandle("GPU-0a1b", b"", bucket.data.nbytes, 0, b"", 0, b"", True)

    async def use(server: InferenceServer) -> None:
        await server.pause()
        for handle, words in (
            (gone.handle, "No such file or directory"),
            (elsewhere, "on the GPU GPU-0a1b, this worker"),
        ):
            await server.begin_update()
            with pytest.raises(ServerError, match=rf"update_weights: HTTP 500.*{words}"):
                await server.receive_handles(bucket.names, bucket.dtypes, bucket.shapes, [handle])
            assert (await server.info()).policy_version == -1
        await by_handle(server, new_model, 6)
        await server.resume()
        answer = await server.generate(ask(SHORT, 20))
        assert answer.versions[0].policy_version == 6 and off(new_model, answer, SHORT) < 1e-5

    call(vllm, use)


def test_it_reports_the_versions_that_a_communicator_depends_on(vllm: Engine) -> None:
    versions = fetch_versions(vllm.url, "vllm", None, 30.0)
    assert str(versions.torch).startswith("2.13.0") and versions.nccl is None and versions.source == ""
    assert versions.variables.keys() == {"NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"}


def test_doctor_names_the_variables_in_which_the_server_and_a_trainer_differ(
    vllm: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``serve`` would have set both to 0, but did not start this server. Of the trainer, only its GPU is made up."""
    config = configs.config(rollout={"engine": "vllm", "servers": {"urls": [vllm.url]}})
    with monkeypatch.context() as gpu:
        gpu.setattr(torch.cuda, "is_available", lambda: True)
        gpu.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
        needs = required_server_features(config, None)
    (report,) = inspect_servers([vllm.url], needs, None)
    for name in ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"):
        expected = f"{name} is {os.environ.get(name, 'not set')} in the server and 0 in the trainer"
        assert [expected in str(problem) for problem in report.problems].count(True) == 1, report


def test_an_update_without_a_pause_is_rejected(vllm: Engine) -> None:
    with pytest.raises(RuntimeError, match="begin_update without pause"):
        call(vllm, lambda server: server.begin_update())


def test_requests_during_a_pause_wait_and_running_requests_can_be_aborted(vllm: Engine, old_model: Reference) -> None:
    async def use(server: InferenceServer) -> None:
        request = ask(SHORT, 1000)
        running = asyncio.create_task(server.generate(request))
        await asyncio.sleep(0.2)
        await server.pause()
        late = asyncio.create_task(server.generate(ask(SHORT, 5)))
        await asyncio.sleep(0.5)
        assert not late.done() and await server.health()
        await server.abort(request.request_id)
        await server.resume()
        for answer in await asyncio.gather(running, late):
            assert not len(answer.token_ids) or off(old_model, answer, SHORT) < 1e-5

    call(vllm, use)


@pytest.mark.parametrize("path", ["update_weights", "finish_weight_update"])
def test_a_trainer_that_leaves_the_group_leaves_a_server_that_can_be_updated(
    vllm: Engine, new_model: Reference, path: str
) -> None:
    norm: Any = (["model.norm.weight"], ["float32"], [[64]])

    async def use(server: InferenceServer) -> None:
        port = free_port()
        joined = asyncio.create_task(server.join_group("127.0.0.1", port, 1, 2, "gloo"))
        trainer = vanishing_trainer("127.0.0.1", port, transfer_group_name("127.0.0.1", port))
        await joined
        await server.pause()
        await server.begin_update()
        await server.receive_broadcast(*norm)  # answered at once: the bucket may come while the one before is loaded
        trainer.kill()
        trainer.wait()
        with pytest.raises(ServerError, match=rf"{path}: HTTP 500"):
            await (server.receive_broadcast(*norm) if path == "update_weights" else server.end_update(5))
        assert (await server.info()).policy_version == -1
        await by_broadcast(server, new_model, 5)
        await server.resume()
        answer = await server.generate(ask(SHORT, 20))
        assert answer.versions[0].policy_version == 5 and off(new_model, answer, SHORT) < 1e-5

    call(vllm, use)

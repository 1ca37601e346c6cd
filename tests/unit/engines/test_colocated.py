"""Servers on the trainer's GPUs: what is refused, how they are started, and who has released its memory."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from http_stub import Call, Stub, with_stub
from megatron_dppo.commands.main import main
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import ConfigError, PublishError, ServerError
from megatron_dppo.weights.publish import release_all
from megatron_dppo_engines.servers.updates import CACHE_RELEASED, RELEASED
from megatron_dppo_engines.sglang import SGLangServer
from megatron_dppo_engines.vllm import VLLMServer
from tests.unit.configs import config, server_plans
from tests.unit.weight_server import FakeServer, make, weights

EXAMPLE = Path(__file__).parents[3] / "examples/chain_sum/dppo.toml"


def colocated(*, servers: Any = (), rollout: Any = (), method: str = "disk", **sections: dict[str, Any]) -> Config:
    sections["rollout"] = {
        "engine": "sglang",
        "servers": {"colocated": True} | dict(servers),
        "weight_sync": {"method": method},
    } | dict(rollout)
    return config(**sections)


def test_what_needs_the_gpus_twice_is_refused() -> None:
    assert not colocated().evaluates_beside_training
    assert colocated(rollout={"abort_slowest": True, "oversample": 2.0, "partial_rollouts": 1})
    for change, words in (
        ({"method": "distributed"}, "NCCL refuses two processes on one GPU. Set method to 'ipc'"),
        ({"train": {"max_staleness": 1}}, "Set train.max_staleness = 0"),
        ({"eval": {"overlap_training": True}}, "remove eval.overlap_training"),
        ({"rollout": {"engine": "local"}}, r"\[rollout.servers\] has no effect with rollout.engine = 'local'"),
    ):
        with pytest.raises(ConfigError, match=words):
            colocated(**change)


@pytest.mark.parametrize(("engine", "flag"), [("sglang", "--enable-memory-saver"), ("vllm", "--enable-sleep-mode")])
def test_they_are_started_on_the_trainers_gpus_with_what_releases_memory(engine: str, flag: str) -> None:
    parsed = colocated(rollout={"engine": engine}, servers={"count": 2})
    plans = server_plans(parsed, {}, ["4", "5", "6"], skip_gpus=3)
    assert [plan.env["CUDA_VISIBLE_DEVICES"] for plan in plans] == ["4", "5"]
    assert all(flag in plan.argv for plan in plans)
    assert flag not in server_plans(parsed, {})[0].argv  # without a GPU the engines refuse it


def test_scripts_are_told_who_has_which_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["serve", str(EXAMPLE), "--rollout.engine", "sglang", "--rollout.weight_sync.method", "disk", "--print-mode"]
    for extra, mode in (
        ([], "start"),
        (["--rollout.servers.colocated", "true"], "colocated"),
        (["--rollout.servers.colocated", "true", "--rollout.servers.urls", '["http://127.0.0.1:9"]'], "attach"),
    ):
        assert main([*line, *extra]) == 0
        assert capsys.readouterr().out.strip() == mode


_OTHERS = (
    "/pause_generation",
    "/flush_cache",
    "/continue_generation",
    "/begin_weight_update",
    "/end_weight_update",
)


def sglang_stub(state: dict[str, Any]) -> dict[str, Any]:
    """SGLang's calls; ``state["away"]`` are the parts without memory, as its scheduler counts them."""

    async def set_version(call: Call) -> Any:
        state["name"] = call.body["new_version"]
        return {"success": True}

    async def release(call: Call) -> Any:
        if state.get("busy"):
            return 500, {"message": "busy"}
        assert not state["away"] & set(call.body["tags"])
        state["away"] |= set(call.body["tags"])

    async def resume(call: Call) -> Any:
        for tag in call.body["tags"]:
            state["away"].remove(tag)

    async def model_info(call: Call) -> Any:
        return {"model_path": "m", "weight_version": state["name"]}

    return {
        "/server_info": {"version": "0.5.23", "device": "cuda", "enable_memory_saver": state.get("saver", True)},
        "/model_info": model_info,
        "/update_weight_version": set_version,
        "/release_memory_occupation": release,
        "/resume_memory_occupation": resume,
        **{path: {"success": True} for path in _OTHERS},
    }


def test_the_name_of_the_weights_tells_the_next_client_what_has_memory() -> None:
    state: dict[str, Any] = {"name": "4", "away": set()}
    seen = []

    async def step(server: SGLangServer, *calls: str) -> None:
        for call in calls:
            await getattr(server, call)(*([5] if call == "end_update" else []))
            seen.append((call, state["name"], sorted(state["away"])))

    async def use(url: str) -> None:
        for calls in (("release_memory", "release_memory"), ("pause", "wake_weights", "wake_weights", "begin_update")):
            await step(SGLangServer(url), *calls)
        await step(SGLangServer(url), "release_memory", "wake_weights")
        await step(SGLangServer(url), "pause", "wake_weights", "begin_update", "end_update", "resume", "wake_weights")

    with_stub(Stub(sglang_stub(state)), use)
    both, cache = ["kv_cache", "weights"], ["kv_cache"]
    assert seen == [
        *[("release_memory", RELEASED, both)] * 2,
        ("pause", RELEASED, both),
        *[("wake_weights", CACHE_RELEASED, cache)] * 2,
        ("begin_update", CACHE_RELEASED, cache),
        ("release_memory", RELEASED, both),
        ("wake_weights", CACHE_RELEASED, cache),
        ("pause", CACHE_RELEASED, cache),
        ("wake_weights", CACHE_RELEASED, cache),
        ("begin_update", CACHE_RELEASED, cache),
        ("end_update", "5", []),
        ("resume", "5", []),
        ("wake_weights", "5", []),
    ]


def test_a_server_that_refuses_keeps_its_name_and_one_without_the_flag_is_told() -> None:
    state: dict[str, Any] = {"name": "4", "away": set(), "busy": True}

    async def refused(url: str) -> None:
        with pytest.raises(ServerError, match="busy"):
            await SGLangServer(url).release_memory()
        with pytest.raises(PublishError, match="keep their memory"):
            await release_all([SGLangServer(url)], 2)
        state["busy"] = False
        assert await release_all([SGLangServer(url)], 1) == []

    with_stub(Stub(sglang_stub(state)), refused)
    assert state["away"] == {"weights", "kv_cache"}

    async def without(url: str) -> None:
        for server, flag in ((SGLangServer(url), "--enable-memory-saver"), (VLLMServer(url), "--enable-sleep-mode")):
            with pytest.raises(ConfigError, match=f"start it with {flag}"):
                await server.release_memory()

    answers = sglang_stub({"name": "4", "away": set(), "saver": False})
    on_gpu = {"model_config": {"enable_sleep_mode": False}, "device_config": {"device": "cuda"}}
    answers["/server_info"] |= {"vllm_config": on_gpu}
    with_stub(Stub(answers), without)


def test_a_dead_server_is_told_of_and_does_not_hold_up_the_others(tmp_path: Path) -> None:
    good, dead = FakeServer("good"), FakeServer("dead")
    dead.frozen = True
    (note,) = asyncio.run(release_all([good, dead], 3))  # type: ignore[arg-type]
    assert "http://dead" in note and good.calls == ["release_memory"] and dead.calls == []
    dead.frozen = False
    sync = make([good, dead], tmp_path)
    sent = weights(0)
    assert set(sync.send(iter(sent.items()), 1).good) == {"http://good", "http://dead"}
    assert good.holds(sent) and good.calls.index("wake_weights") < good.calls.index("weight_layout")
    sync.close()

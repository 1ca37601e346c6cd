"""Command lines of inference servers, and the GPUs of each."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.config.io import load_config
from megatron_dppo.config.schema import Config
from megatron_dppo.engines.serving.command import plan_servers, server_options
from megatron_dppo.engines.serving.nodes import ServerNode
from megatron_dppo.errors import ConfigError
from megatron_dppo_engines.serving.processes import visible_gpus
from megatron_dppo_engines.serving.server_process import ServerPlan
from tests.unit.configs import config, server_plans

ROOT = Path(__file__).parents[3]


def config_of(engine: str = "sglang", **sections: dict[str, Any]) -> Config:
    sections["rollout"] = {"engine": engine} | sections.get("rollout", {})
    sections["model"] = {"path": "folder/model"} | sections.get("model", {})
    return config(**sections)


def plans(config: Config, gpus: Sequence[str] = (), skip: int = 0, **environ: str) -> list[ServerPlan]:
    return server_plans(config, environ, gpus, skip)


def test_sglang_gets_model_address_dtype_and_nothing_that_is_not_needed() -> None:
    (plan,) = plans(config_of())
    assert plan.argv == (
        *(sys.executable, "-m", "sglang.launch_server", "--host", "127.0.0.1", "--port", "30000"),
        *("--model-path", "folder/model", "--dtype", "bfloat16", "--load-format", "dummy", "--enable-fp32-lm-head"),
    )
    assert (
        plan.url == "http://127.0.0.1:30000"
        and plan.env == {name: "0" for name in ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE")}
        and plan.config_file == {}
    )


def test_filters_of_rollouts_become_a_flag_of_vllm() -> None:
    filters = {"top_p": 0.9, "top_k": 50}
    assert "--return-sampling-mask" in plans(config_of("vllm", rollout=filters))[0].argv
    for engine, rollout in (("vllm", {}), ("sglang", filters)):
        assert "--return-sampling-mask" not in plans(config_of(engine, rollout=rollout))[0].argv


def test_routing_and_random_weights_become_flags() -> None:
    parsed = config_of(
        rollout={"dtype": "fp32"},
        train={"router_replay": "rollout"},
        model={"random_init": True},
        distillation={"teacher_path": "t"},
    )
    line = shlex.join(plans(parsed)[0].argv)
    assert "--dtype float32 --load-format dummy --enable-return-routed-experts" in line


def test_vllm_gets_the_flags_that_training_needs() -> None:
    parsed = config_of("vllm", loss={"name": "dppo_topk_tv", "topk": 40}, train={"router_replay": "compare"})
    (plan,) = plans(parsed, PYTHONPATH="/mine")
    line = shlex.join(plan.argv)
    for part in (
        "-m vllm.entrypoints.openai.api_server",
        "--model folder/model",
        "--logprobs-mode processed_logprobs",
        "--generation-config vllm",
        "--enable-scale-out",
        "--enable-return-routed-experts",
        "--max-logprobs 41",
        "--worker-extension-cls megatron_dppo_vllm.WorkerExtension",
        """--weight-transfer-config '{"backend": "megatron_dppo"}'""",
    ):
        assert part in line
    assert plan.env["VLLM_SERVER_DEV_MODE"] == "1"
    assert plan.env["PYTHONPATH"] == f"{ROOT}/packages/engines/src/megatron_dppo_engines/serving/vllm_extension:/mine"


@pytest.mark.parametrize(
    ("engine", "flag", "own", "off"),
    [
        ("sglang", "--enable-fp32-lm-head", {"enable_fp32_lm_head": False}, "fp32"),
        (
            "vllm",
            """--hf-overrides '{"head_dtype": "float32"}'""",
            {"hf_overrides": {"head_dtype": "model"}},
            "float32",
        ),
    ],
)
def test_a_bf16_server_computes_its_logits_in_fp32_unless_told_otherwise(
    engine: str, flag: str, own: dict[str, Any], off: str
) -> None:
    assert flag in shlex.join(plans(config_of(engine))[0].argv)
    assert off not in shlex.join(plans(config_of(engine, rollout={engine: own}))[0].argv)
    assert flag not in shlex.join(plans(config_of(engine, rollout={"dtype": "fp32"}))[0].argv)


@pytest.mark.parametrize("is_nested", [False, True])
def test_recurrent_states_of_linear_attention_are_fp32_on_a_vllm_server_in_bf16(
    is_nested: bool, tmp_path: Path
) -> None:
    def line(engine: str, values: dict[str, Any], **rollout: Any) -> str:
        (tmp_path / "config.json").write_text(json.dumps({"text_config": values} if is_nested else values))
        config = config_of(engine, model={"path": str(tmp_path)}, rollout=rollout)
        return shlex.join(plans(config)[0].argv)

    linear, flag = {"linear_num_value_heads": 32}, "--mamba-ssm-cache-dtype float32"
    assert flag in line("vllm", linear)
    assert flag not in line("vllm", {"num_attention_heads": 32}) and flag not in line("vllm", linear, dtype="fp32")
    assert "--mamba-ssm-cache-dtype bfloat16" in line("vllm", linear, vllm={"mamba_ssm_cache_dtype": "bfloat16"})
    assert "mamba" not in line("sglang", linear), "its default"


def test_a_server_that_gets_adapters_is_told_their_rank_and_targets() -> None:
    sections = {"rollout": {"weight_sync": {"method": "adapter"}}, "lora": {"rank": 24, "target_modules": ["q_proj"]}}
    (plan,) = plans(config_of(**sections))
    line = "--enable-lora --lora-target-modules q_proj --max-lora-rank 24 --max-loras-per-batch 2"
    assert line in shlex.join(plan.argv)
    (plan,) = plans(config_of("vllm", **sections))
    assert "--enable-lora --lora-target-modules q_proj --max-lora-rank 32 --max-loras 1" in shlex.join(plan.argv)
    assert plan.env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    # Experts: SGLang has other names than Mixtral's files, and vLLM one module for all of a layer.
    sections["lora"]["target_modules"] = ["kv_b_proj", "w1", "w2"]
    assert "--lora-target-modules kv_b_proj gate_proj down_proj --max" in shlex.join(
        plans(config_of(**sections))[0].argv
    )
    (plan,) = plans(config_of("vllm", **sections))
    assert "--lora-target-modules kv_b_proj w1 w2 experts --max" in shlex.join(plan.argv)
    sections["lora"]["rank"] = 513
    with pytest.raises(ConfigError, match=r"lora\.rank = 513: vLLM"):
        plans(config_of("vllm", **sections))


def test_other_overrides_of_vllms_model_config_keep_the_fp32_head() -> None:
    (plan,) = plans(config_of("vllm", rollout={"vllm": {"hf_overrides": {"rope_scaling": 2}}}))
    assert """--hf-overrides '{"head_dtype": "float32", "rope_scaling": 2}'""" in shlex.join(plan.argv)


def test_every_key_of_the_engine_section_is_passed_through_and_wins() -> None:
    own = {
        "mem_fraction_static": 0.8,
        "disable-radix-cache": True,
        "enable-metrics": False,
        "cuda-graph-bs": [1, 2, 4],
        "model-path": "/fp8/model",
        "json-model-override-args": {"a": 1},
    }
    (plan,) = plans(config_of(rollout={"sglang": own}))
    line = shlex.join(plan.argv)
    assert "--mem-fraction-static 0.8 --disable-radix-cache --cuda-graph-bs 1 2 4" in line
    assert "metrics" not in line
    assert "--model-path /fp8/model" in line and "folder/model" not in line
    assert "--json-model-override-args '{\"a\": 1}'" in line


def test_servers_have_ports_one_after_the_other_and_the_configured_command() -> None:
    servers = {"count": 3, "port": 4000, "host": "node7", "command": ["my-sglang", "go"]}
    result = plans(config_of(rollout={"servers": servers}))
    assert [plan.url for plan in result] == [f"http://node7:{port}" for port in (4000, 4001, 4002)]
    assert result[2].argv[:6] == ("my-sglang", "go", "--host", "node7", "--port", "4002")


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"host": "0.0.0.0"}, r"\[rollout.sglang\] host: set rollout.servers.host"),
        ({"port": 1}, "set rollout.servers.port"),
        ({"api_key": "k"}, "rollout.servers.api_key_env"),
        ({"x": [1, [2]]}, r"x = \[1, \[2\]\] cannot"),
        ({"x": []}, r"x = \[\] cannot"),
        ({"tp-size": "two"}, "tensor-parallel-size = 'two': expected a whole number"),
    ],
)
def test_arguments_that_cannot_work_are_named(own: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plans(config_of(rollout={"sglang": own}), gpus=["0"])


def test_the_local_engine_has_no_servers() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.engine = 'local'"):
        plans(config_of("local"))


def test_keys_never_become_arguments() -> None:
    servers = {"api_key_env": "KEY", "admin_api_key_env": "ADMIN"}
    (plan,) = plans(config_of(rollout={"servers": servers}), KEY="secret", ADMIN="other")
    assert plan.config_file == {"api-key": "secret", "admin-api-key": "other"}
    assert not {"secret", "other"} & set(plan.argv) and "secret" not in repr(plan)
    (plan,) = plans(config_of("vllm", rollout={"servers": {"api_key_env": "KEY"}}), KEY="secret")
    assert plan.env["VLLM_API_KEY"] == "secret" and "secret" not in shlex.join(plan.argv) + repr(plan)


def test_keys_that_are_missing_or_have_no_meaning_are_errors() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.servers\.api_key_env = 'KEY'"):
        plans(config_of(rollout={"servers": {"api_key_env": "KEY"}}))
    with pytest.raises(ConfigError, match="vLLM has one key"):
        plans(config_of("vllm", rollout={"servers": {"admin_api_key_env": "KEY"}}), KEY="k")
    with pytest.raises(ConfigError, match="SGLang accepts only one"):
        plans(config_of(rollout={"servers": {"api_key_env": "KEY"}, "sglang": {"config": "a.yaml"}}), KEY="k")


def test_each_server_gets_its_own_gpus_after_those_of_the_trainer() -> None:
    parsed = config_of(rollout={"servers": {"count": 2}, "sglang": {"tp-size": 2}})
    gpus = [str(i) for i in range(8)]
    assert [p.env["CUDA_VISIBLE_DEVICES"] for p in plans(parsed, gpus)] == ["0,1", "2,3"]
    assert [p.env["CUDA_VISIBLE_DEVICES"] for p in plans(parsed, gpus, 4)] == ["4,5", "6,7"]
    with pytest.raises(ConfigError, match=r"2 servers of 2 GPUs \+ 5"):
        plans(parsed, gpus, 5)
    assert all("CUDA_VISIBLE_DEVICES" not in p.env for p in plans(parsed))


@pytest.mark.parametrize(
    ("own", "size"),
    [
        ({"tp": 2, "pp_size": 2}, 4),
        ({"tensor_parallel_size": 2, "dp-size": 3}, 6),
        ({"tp-size": 4, "dp-size": 4, "enable-dp-attention": True}, 4),
    ],
)
def test_a_server_needs_the_product_of_its_parallel_sizes(own: dict[str, Any], size: int) -> None:
    (plan,) = plans(config_of(rollout={"sglang": own}), [str(i) for i in range(8)])
    assert len(plan.env["CUDA_VISIBLE_DEVICES"].split(",")) == size


@pytest.mark.parametrize(
    ("engine", "sections", "is_skipped"),
    [
        ("sglang", {}, True),
        ("vllm", {}, True),
        ("sglang", {"rollout": {"weight_sync": {"method": "disk", "folder": "/shared/w"}}}, True),
        # Nothing proves that the sync has written everything.
        ("sglang", {"rollout": {"weight_sync": {"checksum_every": 0}}}, False),
        # Weights that no sync sends: a base model below adapters, a draft model, quantized and replicated weights.
        ("sglang", {"lora": {"rank": 8}, "rollout": {"weight_sync": {"method": "adapter"}}}, False),
        ("sglang", {"rollout": {"sglang": {"speculative-algorithm": "EAGLE"}}}, False),
        ("vllm", {"rollout": {"vllm": {"speculative_config": {"model": "d"}}}}, False),
        ("vllm", {"rollout": {"vllm": {"quantization": "fp8"}}}, False),
        ("sglang", {"rollout": {"sglang": {"enable_eplb": True}}}, False),
        ("sglang", {"rollout": {"servers": {"model": "q"}, "weight_sync": {"method": "disk"}}}, False),
        # Without files there is nothing to read, whatever is proved.
        (
            "sglang",
            {
                "model": {"random_init": True},
                "distillation": {"teacher_path": "t"},
                "rollout": {"weight_sync": {"checksum_every": 0}},
            },
            True,
        ),
    ],
)
def test_weights_that_the_first_sync_replaces_are_not_read(
    engine: str, sections: dict[str, Any], is_skipped: bool
) -> None:
    argv = plans(config_of(engine, **sections))[0].argv
    assert ("--load-format" in argv) == is_skipped
    assert not is_skipped or argv[argv.index("--load-format") + 1] == "dummy"


def test_the_users_load_format_wins() -> None:
    argv = plans(config_of(rollout={"sglang": {"load-format": "safetensors"}}))[0].argv
    assert argv.count("--load-format") == 1 and argv[argv.index("--load-format") + 1] == "safetensors"


SPANNING = {"tp-size": 16, "nnodes": 2}


def spanning(node: ServerNode | None, **rollout: Any) -> ServerPlan:
    made = config_of(rollout={"sglang": SPANNING} | rollout)
    server = server_options(made.rollout, made.model, made.lora, routed_experts=False, topk_logprobs=0)
    (plan,) = plan_servers(made.rollout, server, {}, [str(i) for i in range(8)], 0, node)
    return plan


@pytest.mark.parametrize("rank", [0, 1])
def test_a_server_over_two_nodes_has_a_rank_and_half_of_its_gpus_on_each(rank: int) -> None:
    plan = spanning(ServerNode(rank=rank, address="10.0.0.1:28500"))
    line = shlex.join(plan.argv)
    assert "--tp-size 16 --nnodes 2" in line
    assert line.endswith(f"--node-rank {rank} --dist-init-addr 10.0.0.1:28500")
    assert plan.env["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"


NODE = ServerNode(rank=1, address="[fd00::1]:28500")


@pytest.mark.parametrize(
    ("node", "rollout", "message"),
    [
        (None, {}, "nnodes = 2: start `megatron-dppo serve`"),
        (ServerNode(rank=2, address="a:1"), {}, "--node-rank 2: expected 0 to 1"),
        (ServerNode(rank=-1, address="a:1"), {}, "--node-rank -1: expected 0 to 1"),
        (ServerNode(rank=0, address="a"), {}, "--dist-init-addr a: expected HOST:PORT"),
        (NODE, {"sglang": {"tp-size": 8}}, "--node-rank 1 with a server"),
        (NODE, {"sglang": {"tp-size": 9, "nnodes": 2}}, "not divide the 9 GPUs"),
        (NODE, {"sglang": {"nnodes": True}}, "nnodes = True: expected"),
        (NODE, {"weight_sync": {"method": "ipc"}}, "'ipc' shares the memory"),
        (
            NODE,
            {"servers": {"colocated": True}, "weight_sync": {"method": "disk"}},
            "server on the GPUs",
        ),
        (NODE, {"sglang": {"tp-size": 2, "nnodes": 2}, "servers": {"count": 2}}, "set count = 1"),
    ],
)
def test_a_server_over_nodes_that_cannot_be_is_refused(
    node: ServerNode | None, rollout: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        spanning(node, **rollout)


VLLM_NODES = {"tensor-parallel-size": 16, "nnodes": 2}


def vllm_part(rank: int, address: str, command: list[str] | None = None, **rollout: Any) -> ServerPlan:
    servers = {"host": f"10.0.0.{rank}", "port": 30000} | ({} if command is None else {"command": command})
    made = config_of("vllm", rollout={"vllm": VLLM_NODES, "servers": servers} | rollout)
    server = server_options(made.rollout, made.model, made.lora, routed_experts=False, topk_logprobs=0)
    node = ServerNode(rank=rank, address=address)
    (plan,) = plan_servers(made.rollout, server, {}, [str(i) for i in range(8)], 0, node)
    return plan


@pytest.mark.parametrize(
    ("address", "host", "url"),
    [
        ("10.0.0.0:28500", "10.0.0.0", "http://10.0.0.0:30000"),
        ("[fd00::1]:28500", "fd00::1", "http://[fd00::1]:30000"),
    ],
)
def test_only_node_0_of_a_vllm_server_listens_and_the_others_ask_its_health(address: str, host: str, url: str) -> None:
    first, second = (vllm_part(rank, address) for rank in (0, 1))
    for rank, plan in enumerate((first, second)):
        line = shlex.join(plan.argv)
        assert "--tensor-parallel-size 16 --nnodes 2" in line and f"--node-rank {rank} --master-addr {host}" in line
        assert "--master-port 28500" in line and plan.env["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"
    assert first.listens and first.url == "http://10.0.0.0:30000" and "--headless" not in first.argv
    assert not second.listens and second.url == url and second.argv[-1] == "--headless"


@pytest.mark.parametrize(
    ("command", "first", "second"),
    [
        (None, [sys.executable, "-m", "vllm.entrypoints.openai.api_server"], None),
        (["/e/bin/python", "-m", "vllm.entrypoints.openai.api_server"], None, "/e/bin/python"),
        (["vllm", "serve"], None, ["vllm", "serve"]),
        (["/wrap.sh", "serve", "0.32.0"], None, ["/wrap.sh", "serve", "0.32.0"]),
    ],
)
def test_a_node_that_does_not_listen_needs_the_command_that_knows_headless(
    command: list[str] | None, first: list[str] | None, second: list[str] | str | None
) -> None:
    """vLLM 0.32: ``openai.api_server`` ignores --headless and starts a second API; ``vllm serve`` takes it."""
    expected = command or first or []
    argv = vllm_part(0, "a:1", command).argv
    assert list(argv[: len(expected)]) == expected and argv[len(expected)] == "--host"
    if not isinstance(second, list):
        second = [second or sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
    argv = vllm_part(1, "a:1", command).argv
    assert list(argv[: len(second)]) == second and argv[len(second)] == "--host"


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"vllm": VLLM_NODES | {"data-parallel-size": 2}}, "replicas of a vLLM server .*"),
        ({"weight_sync": {"method": "ipc"}}, "'ipc' shares the memory"),
        ({"servers": {"colocated": True}, "weight_sync": {"method": "disk"}}, "GPUs of one node"),
        ({"servers": {"count": 2}}, "set count = 1"),
        ({"vllm": VLLM_NODES | {"nnodes": 3}}, "not divide the 16 GPUs"),
    ],
)
def test_a_vllm_server_over_nodes_that_cannot_be_is_refused(rollout: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        vllm_part(0, "a:1", **rollout)


@pytest.mark.parametrize(
    ("engine", "option", "message"),
    [
        ("sglang", {"disaggregation_mode": "prefill"}, "answer only together"),
        ("vllm", {"kv-transfer-config": {"kv_role": "kv_both"}}, "answer only together"),
        ("sglang", {"node-rank": 1}, "pass it to `megatron-dppo serve`"),
        ("sglang", {"dist_init_addr": "a:1"}, "pass it to `megatron-dppo serve`"),
        ("vllm", {"master_addr": "a"}, "pass --node-rank and --dist-init-addr to `megatron-dppo serve`"),
        ("vllm", {"headless": True}, "pass --node-rank and --dist-init-addr to `megatron-dppo serve`"),
    ],
)
def test_options_of_parts_of_a_server_are_refused(engine: str, option: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plans(config_of(engine, rollout={engine: option}))


def test_visible_gpus_are_those_of_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3, GPU-a1"}) == ["3", "GPU-a1"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == visible_gpus({"CUDA_VISIBLE_DEVICES": "-1,0"}) == []
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_gpus({}) == []
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 0\necho 1\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert visible_gpus({}) == ["0", "1"]


def test_the_path_of_a_command_is_looked_up_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "examples/chain_sum/sglang.toml").read_text()
    file = tmp_path / "run" / "x.toml"
    file.parent.mkdir()
    (tmp_path / "start").touch()
    file.write_text(text.replace("../../tools/engines/sglang.sh", "../start"))
    assert load_config(file).rollout.servers.command[0] == f"{tmp_path}/start"
    file.write_text(text.replace("../../tools/engines/sglang.sh", "nowhere/start"))
    assert load_config(file).rollout.servers.command[0] == "nowhere/start"
    monkeypatch.chdir(file.parent)
    (file.parent / "start").touch()
    Path("x.toml").write_text(text.replace("../../tools/engines/sglang.sh", "./start"))
    assert load_config("x.toml").rollout.servers.command[0] == f"{file.parent}/start"
    Path("x.toml").write_text(text.replace("../../tools/engines/sglang.sh", "start"))
    assert load_config("x.toml").rollout.servers.command[0] == "start"

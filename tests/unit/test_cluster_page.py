"""docs/two_nodes.md: each size resolves for its ranks, and the manifest says what the page says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_dppo.config.io import load_config
from megatron_dppo.config.layout import resolve_parallel
from tests.unit.configs import QWEN3_30B_A3B

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/two_nodes.md").read_text(encoding="utf-8")
SIZES = PAGE.split("## The job for each size\n")[1].split("\n## ")[0]
COMMANDS = [line for line in SIZES.splitlines() if line.startswith("sbatch ")]
GPUS = 8


def overrides_after(words: list[str], script: str) -> tuple[str, list[str], int]:
    """Return the configuration, its overrides and the number of server nodes."""
    rest = words[words.index(script) + 1 :]
    servers = 0
    if rest[0] == "--server-nodes":
        servers = int(rest[1])
        rest = rest[2:]
    return rest[0], rest[1:], servers


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.split()[1])
def test_each_size_resolves(command: str) -> None:
    words = shlex.split(command)
    path, overrides, servers = overrides_after(words, "launch/qwen3_moe_dppo.sh")
    options = dict(word.removeprefix("--").split("=", 1) for word in words[1 : words.index("launch/qwen3_moe_dppo.sh")])
    nodes = int(options["nodes"])
    config = load_config(ROOT / path, overrides)
    layout = resolve_parallel(config.parallel, (nodes - servers) * GPUS, QWEN3_30B_A3B)
    assert layout.tp * layout.pp * layout.cp * layout.dp == (nodes - servers) * GPUS
    assert config.batch.prompts_per_step % layout.dp == 0
    assert config.rollout.servers.colocated == (servers == 0)


def test_the_page_has_all_sizes() -> None:
    assert [int(re.findall(r"--nodes=(\d+)", command)[0]) for command in COMMANDS] == [1, 2, 4, 8, 16]


def containers() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return the job and the container of each part of the JobSet."""
    manifest = yaml.safe_load((ROOT / "launch/kubernetes.yaml").read_text(encoding="utf-8"))
    assert manifest["kind"] == "JobSet"
    return {
        job["name"]: (job, job["template"]["spec"]["template"]["spec"]["containers"][0])
        for job in manifest["spec"]["replicatedJobs"]
    }


def test_the_manifest_starts_what_the_docs_say() -> None:
    parts = containers()
    job, train = parts["trainer"]
    environment = {item["name"]: item.get("value") for item in train["env"]}
    words = shlex.split(train["args"][0].replace("$MASTER_ADDR", environment["MASTER_ADDR"]))
    ranks = words.index("--nproc-per-node")
    path = ROOT / "examples/qwen3_30b_a3b/dppo.toml"
    config = load_config(path, words[ranks + 2 :])
    assert int(words[ranks + 1]) == train["resources"]["limits"]["nvidia.com/gpu"] == GPUS
    assert int(environment["NUM_NODES"]) == job["template"]["spec"]["completions"]
    assert config.rollout.weight_sync.host == environment["MASTER_ADDR"] == "dppo-trainer-0-0.dppo"
    per_node = GPUS // 2  # the example's servers have tp-size 2
    port = config.rollout.servers.port
    expected = [f"http://dppo-servers-0-0.dppo:{port + i}" for i in range(per_node)]
    assert list(config.rollout.servers.resolved_urls) == expected
    rules = job["template"]["spec"]["podFailurePolicy"]["rules"]
    assert rules[0]["action"] == "FailJob" and rules[0]["onExitCodes"]["values"] == [2, 3]

    _, serve = parts["servers"]
    words = shlex.split(serve["args"][0])
    assert words[:4] == ["exec", "megatron-dppo", "serve", "/shared/my.toml"]
    served = load_config(path, words[words.index("--rollout.servers.host") :])
    assert served.rollout.servers.api_key_env == config.rollout.servers.api_key_env == "DPPO_KEY"
    assert {"DPPO_KEY", "NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"} <= {item["name"] for item in serve["env"]}
    # Both sides of a communicator need the same values.
    served_values = {item["name"]: item.get("value") for item in serve["env"]}
    assert all(environment[name] == value for name, value in served_values.items())

"""Our model through Megatron's Transformer Engine layers, both Megatron versions, by the real Python of both packages.

Their wheels come from the package registry, 3.6 MB; without them these tests fail.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.unit.wheels import unpacked

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
TRANSFORMER_ENGINE, MEGATRON = "2.20.2", "0.19.2"
CASES: list[dict[str, Any]] = [
    {"model": "qwen3_moe", "world": 1},
    {"model": "qwen2_moe", "tp": 2, "ep": 4, "world": 8},
    {"model": "qwen3", "tp": 2, "cp": 2, "world": 4},
    {"model": "glm4_moe", "world": 1},
    {"model": "deepseek_v3", "tp": 2, "ep": 2, "cp": 2, "world": 8},
    {"model": "moonlight", "world": 1},
    {"model": "olmoe", "tp": 2, "world": 2},
    {"model": "mixtral", "ep": 2, "world": 2},
    {"model": "gpt_oss", "tp": 2, "ep": 2, "world": 2},
    {"model": "qwen3_next", "tp": 2, "cp": 2, "world": 4},
    {"model": "qwen3_5", "ep": 2, "world": 2},
    {"model": "qwen3_moe", "pp": 2, "ep": 2, "world": 4, "transformer": {"use_te_activation_func": True}},
]
PARAMETERS = [65, 55, 35, 82, 74, 90, 95, 55, 103, 95, 81, 24]


WRONG = """
import megatron_dppo.mcore.mapping as mapping, tests.unit.te_names as names, tests.unit.te_stub as stub
find = mapping.find_rule
def without_fc1(name, shape, tied):
    if "linear_fc1.layer_norm_weight" in name:
        raise KeyError(name)
    return find(name, shape, tied)
mapping.find_rule = without_fc1
real = names.stub_transformer_engine
def renamed(folder):
    real(folder)
    import transformer_engine.pytorch.module.layernorm_linear as module
    init = module.LayerNormLinear.__init__
    def other_shape(self, in_features, out_features, **more):
        init(self, in_features, out_features + 64, **more)
    module.LayerNormLinear.__init__ = other_shape
    import transformer_engine.pytorch.permutation as permutation
    import transformer_engine.pytorch as pytorch
    pytorch.moe_permute_with_probs = permutation.moe_permute_with_probs = lambda inp, probs, mask: None
names.stub_transformer_engine = renamed
names.main()
"""


def build(engine: Path, cases: list[dict[str, Any]], *front: Path, program: str = "") -> list[dict[str, Any]]:
    path = os.pathsep.join(map(str, [*front, ROOT, os.environ.get("PYTHONPATH", "")]))
    start = ["-c", program] if program else ["-m", "tests.unit.te_names"]
    command = [sys.executable, *start, str(engine), json.dumps(cases)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Return the output of the three programs, which run at the same time."""
    engine = unpacked(f"transformer-engine=={TRANSFORMER_ENGINE}", tmp_path_factory.mktemp("engine"))
    newer = unpacked(f"megatron-core=={MEGATRON}", tmp_path_factory.mktemp("megatron"))
    with ThreadPoolExecutor() as threads:
        running = {
            "newer": threads.submit(build, engine, CASES, newer),
            "installed": threads.submit(build, engine, CASES),
            "wrong": threads.submit(build, engine, CASES[:1], program=WRONG),
        }
        return {name: future.result() for name, future in running.items()}


def check(actual: list[dict[str, Any]], version: str) -> None:
    *models, calls = actual
    assert calls == {"calls": []}
    assert [model["megatron"] for model in models] == [version] * len(CASES)
    assert [model["wrong"] for model in models] == [[]] * len(CASES)
    assert [model["parameters"] for model in models] == PARAMETERS
    for model, case in zip(models, CASES, strict=True):
        experts, own_activation = case["model"] != "qwen3", "transformer" in case
        assert {"TELayerNormColumnParallelLinear", "TERowParallelLinear", "TEDotProductAttention"} <= set(
            model["kinds"]
        )
        assert not experts or "TEColumnParallelGroupedLinear" in model["kinds"]
        assert model["fusions"] == {
            "apply_rope_fusion": case["model"] not in ("deepseek_v3", "moonlight", "gpt_oss"),
            "moe_permute_fusion": experts,
            "bias_activation_fusion": not own_activation,
            "gradient_accumulation_fusion": True,
            "attention.fuse_wgrad_accumulation": True,
            "output_layer": False,
        }


def test_names_shapes_and_fusions_with_the_installed_megatron(built: dict[str, list[dict[str, Any]]]) -> None:
    from megatron_dppo_megatron_cpu.shims import megatron_version

    check(built["installed"], ".".join(map(str, megatron_version())))


def test_names_shapes_and_fusions_with_the_newer_megatron(built: dict[str, list[dict[str, Any]]]) -> None:
    check(built["newer"], MEGATRON)


def test_a_differing_name_shape_or_signature_is_detected(built: dict[str, list[dict[str, Any]]]) -> None:
    model, calls = built["wrong"]
    wrong = " ".join(model["wrong"])
    assert "linear_fc1.layer_norm_weight: no rule maps it" in wrong
    assert "self_attention.linear_qkv.weight: (576, 128), expected (512, 128)" in wrong
    assert "num_out_tokens" in " ".join(calls["calls"])

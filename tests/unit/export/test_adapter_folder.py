"""Adapters in PEFT's format: what PEFT makes of the folder equals W + s B A of transformers in float64."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_dppo.config.model import LoraConfig
from megatron_dppo.export.adapter_folder import (
    adapter_config,
    describe_peft_problem,
    save_adapter,
    write_adapter,
)
from megatron_dppo_convert.fused_adapter import fuse_experts
from tests.distributed.lora import ALL, ALPHA, LATENT, LATENT_PLAIN_QUERY, MIXTRAL, MLP, RANK, Float64
from tests.distributed.parity import Case
from tests.unit.peft_error import peft_error, peft_model
from tests.unit.wheels import unpacked

LORA = LoraConfig(rank=RANK, alpha=ALPHA)


def adapters_of(side: Float64) -> dict[str, torch.Tensor]:
    return {name: value.detach().float() for name, value in side.adapters.items()}


@pytest.mark.parametrize("case", [Case(), Case(dense=True)], ids=["experts", "dense"])
def test_peft_loads_the_folder(case: Case, tmp_path: Path) -> None:
    side = Float64(case, ALL)
    save_adapter(tmp_path / "adapter", adapters_of(side).items(), LORA, "unused")
    assert peft_error(case, ALL, tmp_path / "adapter") < 1e-6


EXPERT_TARGETS = [
    targets for count in range(4) for targets in itertools.combinations(("gate_proj", "up_proj", "down_proj"), count)
]
"""All sets of projections of an MLP."""


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_export_warns_of_what_peft_does_not_read(
    shared: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each set of targets, with PEFT itself: it raises or computes another policy exactly where the export warns."""
    case = Case(shared=shared)
    for count, targets in enumerate(EXPERT_TARGETS if not shared else [(), ("down_proj",), EXPERT_TARGETS[-1]]):
        chosen = ("q_proj", *targets)
        lora = LoraConfig(rank=RANK, alpha=ALPHA, target_modules=list(chosen))
        capsys.readouterr()
        save_adapter(tmp_path / str(count), adapters_of(Float64(case, chosen)).items(), lora, "unused")
        has_warned = "warning  " in capsys.readouterr().err
        try:
            error = peft_error(case, chosen, tmp_path / str(count))
        except (ValueError, RuntimeError, KeyError):
            error = math.inf
        assert has_warned == (error > 1e-6), (chosen, error)
        assert has_warned == (bool(targets) if shared else targets not in ((), ("down_proj",), EXPERT_TARGETS[-1]))


DEEPSEEK = (*LATENT, *MLP)
FAMILIES: list[tuple[str, tuple[str, ...], bool]] = [
    ("mixtral", MIXTRAL, True),
    ("deepseek_v3", LATENT, True),
    ("deepseek_v3", DEEPSEEK, False),
    ("moonlight", (*LATENT_PLAIN_QUERY, "down_proj"), False),
    ("moonlight", LATENT_PLAIN_QUERY, True),
    ("glm4_moe_lite", LATENT, True),
    ("glm4_moe_lite", ("kv_b_proj", "up_proj"), False),
    ("glm4_moe_lite", DEEPSEEK, False),
    ("mixtral", ("q_proj", "w2"), True),
    ("mixtral", ("q_proj", "w1", "w3"), False),
    ("mixtral", ("w3",), False),
    ("minimax_m2", MIXTRAL, True),
    ("minimax_m2", ("o_proj", "w2", "w1"), False),
    ("olmoe", ALL, True),
    *((name, ALL, True) for name in ("llama", "mistral", "qwen2")),
]
"""Tiny model, targets, and True if PEFT 0.21.2 computes the policy. CI takes the first two."""


def check_family(family: str, targets: tuple[str, ...], folder: Path) -> bool:
    """Return True if the export warns. PEFT has the policy, and writes what it read, exactly where it does not."""
    case = Case(family=family)
    adapters = adapters_of(Float64(case, targets))
    lora = LoraConfig(rank=RANK, alpha=ALPHA, target_modules=list(targets))
    save_adapter(folder, adapters.items(), lora, "unused")
    has_warned = bool(describe_peft_problem(adapters))
    try:
        error = peft_error(case, targets, folder)
    except (ValueError, RuntimeError, KeyError):
        error = math.inf
    assert has_warned == (error > 2e-6), (family, targets, error)
    if not has_warned:
        peft_model(case, folder).save_pretrained(str(folder / "again"))
        written = load_file(folder / "again/adapter_model.safetensors")
        plain = {name: value for name, value in adapters.items() if ".experts." not in name}
        assert all(torch.equal(written[name], value) for name, value in plain.items()), (family, targets)
    return has_warned


def test_peft_loads_latents_and_renamed_experts(tmp_path: Path) -> None:
    for count, (family, targets, is_read) in enumerate(FAMILIES[:2]):
        assert check_family(family, targets, tmp_path / str(count)) != is_read


@pytest.mark.long
def test_export_warns_of_what_peft_does_not_read_of_every_family(tmp_path: Path) -> None:
    for count, (family, targets, is_read) in enumerate(FAMILIES[2:]):
        assert check_family(family, targets, tmp_path / str(count)) != is_read, (family, targets)


def test_dense_models_and_attention_need_no_warning() -> None:
    prefix = "base_model.model.model.layers.0"
    dense = [f"{prefix}.mlp.{name}_proj.lora_A.weight" for name in ("gate", "up")]
    expert = [f"{prefix}.mlp.experts.3.{name}_proj.lora_B.weight" for name in ("gate", "up")]
    attention = [f"{prefix}.self_attn.q_proj.lora_A.weight"]
    assert describe_peft_problem(attention) == describe_peft_problem([*dense, *attention]) == ""
    assert "on gate_proj, up_proj alone" in describe_peft_problem([*attention, *expert])
    mixtral = [f"{prefix}.block_sparse_moe.experts.3.{name}.lora_A.weight" for name in ("w1", "w3")]
    assert "on w1, w3 alone; expected w2, or w1, w3 and w2" in describe_peft_problem(mixtral)
    down = f"{prefix}.mlp.experts.3.down_proj.lora_A.weight"
    assert describe_peft_problem([*expert, down]) == ""
    for other in (dense[0], f"{prefix}.mlp.shared_expert.down_proj.lora_A.weight"):
        assert "silently drops" in describe_peft_problem([*expert, down, other])


@pytest.mark.slow
def test_peft_018_loads_fused_experts(tmp_path: Path) -> None:
    """With its wheel, in a process of its own."""
    cases = {"experts": Case(), "shared": Case(shared=True), "mixed": Case(dense_layers=(2,))}
    chosen = [(name, case, t) for name, case in cases.items() for t in (ALL, ("q_proj", "up_proj"), ("down_proj",))]
    chosen += [(name, Case(family=name), t) for name in ("mixtral", "minimax_m2") for t in (MIXTRAL, ("w1",), ("w2",))]
    chosen += [("deepseek_v3", Case(family="deepseek_v3"), DEEPSEEK)]
    asked = []
    for name, case, targets in chosen:
        folder = tmp_path / f"{name}-{'+'.join(targets)}"
        adapter = adapters_of(Float64(case, targets))
        lora = LoraConfig(rank=RANK, alpha=ALPHA, target_modules=list(targets))
        write_adapter(folder, *fuse_experts(adapter, adapter_config(lora, "unused")))
        model = {"shared": case.shared, "dense_layers": case.dense_layers, "family": case.family}
        asked.append({"case": model, "targets": targets, "folder": str(folder)})
    place = tmp_path / "wheel"
    place.mkdir()
    path = os.pathsep.join([str(unpacked("peft==0.18.1", place)), str(Path(__file__).parents[3])])
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.peft_error"],
        input=json.dumps(asked),
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    version, *errors = done.stdout.split()
    assert version == "0.18.1" and len(errors) == len(asked)
    assert max(map(float, errors)) < 1e-6, dict(zip([a["folder"] for a in asked], errors, strict=True))


def test_fused_experts_by_the_formula_of_peft_018() -> None:
    """``delta[e, i, o] = sum_r B[o, r, e] A[e, r, i]`` of its ``ParamWrapper``, for a parameter ``[experts, i, o]``."""
    generator, prefix = torch.Generator().manual_seed(0), "base_model.model.model.layers.3.mlp.experts"
    experts, rank, width, hidden = 3, 2, 5, 7
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    tensors, expected = (
        {},
        {"gate_up": torch.zeros(experts, 2 * width, hidden), "down": torch.zeros(experts, hidden, 5)},
    )
    for e in range(experts):
        for i, (kind, (rows, columns)) in enumerate(shapes.items()):
            a, b = torch.rand(rank, columns, generator=generator), torch.rand(rows, rank, generator=generator)
            tensors |= {f"{prefix}.{e}.{kind}_proj.lora_{p}.weight": x for p, x in (("A", a), ("B", b))}
            where = expected["down"][e] if kind == "down" else expected["gate_up"][e, i * width : (i + 1) * width]
            where += b @ a
    attention = {"base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight": torch.ones(2, 2)}
    actual, config = fuse_experts(tensors | attention, adapter_config(LoraConfig(rank=rank, alpha=6.0), "unused"))
    for kind, name, width_of in (("gate_up", "base_layer.", 2 * rank), ("down", "", rank)):
        a, b = (actual.pop(f"{prefix}.{name}lora_{part}.weight") for part in "AB")
        product = torch.einsum(
            "ore,eri->eio", b.reshape(len(b), width_of, experts), a.reshape(experts, width_of, a.shape[1])
        )
        torch.testing.assert_close(product, expected[kind])
    assert actual == attention and config["target_modules"] == ["q_proj"]
    assert config["target_parameters"] == ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    (pattern,) = config["rank_pattern"]
    assert (config["rank_pattern"][pattern], config["alpha_pattern"][pattern], config["r"]) == (4, 12, 2)

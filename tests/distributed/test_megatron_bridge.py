"""Models that Megatron Bridge builds, loads and exports equal transformers; what it leaves out is refused by name.

Runs where the package is: ``make test-bridge``. On the CPU its provider gets our torch layers by its own field. What it
imports of Transformer Engine, for adapters that we refuse, is a stand-in.
"""

from __future__ import annotations

import importlib.util
import logging
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_dppo.errors import CheckpointError, ConfigError
from megatron_dppo.hf.families import get_family
from megatron_dppo.hf.folder import DictWeights, stream_model, weight_shapes
from megatron_dppo.parallel.platform import Platform
from tests.distributed.families import TINY, family_config
from tests.distributed.layouts import EP, FULL, PP, TP, VPP
from tests.distributed.parity import TOLERANCE, Case, build_trainer, config_for, hf_reference, measure, on_cpu
from tests.distributed.spawn import run_distributed

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(
        importlib.util.find_spec("megatron.bridge") is None, reason="needs megatron-bridge: make test-bridge"
    ),
]
PROVIDED = {"family": "qwen3_moe", "provider": "megatron-bridge"}
DENSE = PROVIDED | {"family": "qwen3"}
LATENT = PROVIDED | {"family": "deepseek_v3"}
CASES = {
    1: [Case(**PROVIDED), Case(tied=True, **DENSE), Case(**LATENT)],
    2: [
        Case(TP, **PROVIDED),
        Case(EP, **PROVIDED),
        Case(PP, tied=True, **PROVIDED),
        Case(VPP, transformer=FULL, **DENSE),
        Case(TP, **LATENT),
    ],
}


def import_bridge() -> Platform:
    """Import Megatron Bridge without Transformer Engine, which its adapters name while they are imported."""
    from megatron_dppo.mcore.shims import apply_shims

    platform = Platform.detect(force_cpu=True)
    apply_shims(platform)
    # Bound without Transformer Engine, before the stand-in is there.
    import megatron.core.models.gpt.gpt_layer_specs

    engine: Any = types.ModuleType("transformer_engine")
    engine.__path__ = []
    engine.pytorch = types.ModuleType("transformer_engine.pytorch")
    engine.pytorch.Linear = torch.nn.Linear
    engine.pytorch.ops = types.SimpleNamespace(Sequential=torch.nn.Sequential)
    names = {"transformer_engine": engine, "transformer_engine.pytorch": engine.pytorch}
    logging.disable(logging.WARNING)  # each name that the stand-in lacks, with a traceback
    sys.modules.update(names)
    import megatron.bridge  # noqa: F401

    for name in names:
        del sys.modules[name]
    return platform


def parity(rank: int, world_size: int, cases: list[Case]) -> None:
    platform = import_bridge()
    from megatron.core import parallel_state

    for case in cases:
        errors = measure(case, platform)
        assert errors.pop("export") == 0.0, f"{case} on rank {rank}: export differs from what was loaded"
        wrong = {name: error for name, error in errors.items() if not error < TOLERANCE}
        assert not wrong, f"{case} on rank {rank}: {wrong}"
        dist.barrier()
        parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("processes", CASES)
def test_provided_models_equal_transformers_in_float64(processes: int) -> None:
    run_distributed(parity, processes, CASES[processes], timeout=400.0)


def refusals(rank: int, world_size: int) -> None:
    platform = import_bridge()
    case = Case(EP, **PROVIDED)
    model = hf_reference(False, family=case.family)
    trainer = build_trainer(case, model, platform, "fp32")
    weights = dict(stream_model(model))
    loaded = on_cpu(trainer.bridge.export())

    def load(changed: dict[str, torch.Tensor]) -> None:
        trainer.bridge.load(DictWeights(changed.items()))

    # Megatron Bridge itself warns of a missing weight, leaves the parameter as it was, and does not export it.
    gate = "model.layers.1.mlp.gate.weight"
    with pytest.raises(CheckpointError, match=r"leaves 1 parameters random.*layers.1.mlp.router.weight"):
        load({name: weight for name, weight in weights.items() if name != gate})
    # Of one rank alone.
    expert = "model.layers.2.mlp.experts.7.down_proj.weight"
    with pytest.raises(CheckpointError, match=r"leaves 1 parameters random.*layers.2.mlp.experts.linear_fc2"):
        load({name: weight for name, weight in weights.items() if name != expert})
    with pytest.raises(CheckpointError, match=r"not exported.*model.layers.0.extra.weight"):
        load(weights | {"model.layers.0.extra.weight": torch.zeros(3)})
    with pytest.raises(CheckpointError, match="cannot load"):
        load(weights | {gate: weights[gate][:, :-1]})
    # A mapping that gives back other values, on one rank's part of the names alone.
    bridge = trainer.bridge._bridge
    export = type(bridge).export_hf_weights
    type(bridge).export_hf_weights = lambda self, *a, **k: (
        (name, tensor + (name == gate)) for name, tensor in export(self, *a, **k)
    )
    with pytest.raises(CheckpointError, match=f"other values.*{gate}"):
        load(weights)
    type(bridge).export_hf_weights = export
    load(weights)
    again = on_cpu(trainer.bridge.export())
    assert again.keys() == loaded.keys() == weights.keys()
    assert all(torch.equal(again[name], weight) for name, weight in loaded.items())
    dist.barrier()

    from megatron_dppo.mcore.megatron_bridge import provider_config

    for transformer, architectures, message in (
        ({}, None, "no model.*architectures"),
        ({"no_such_field": 1}, ["Qwen3MoeForCausalLM"], "no_such_field"),
        ({"num_layers": 3}, ["Qwen3MoeForCausalLM"], "num_layers = 3.*from config.json"),
    ):
        model.config.architectures = architectures
        settings = config_for(Case(transformer=transformer, **PROVIDED)).model
        with pytest.raises(ConfigError, match=message):
            provider_config(model.config, settings, trainer.layout, platform)


def test_what_megatron_bridge_does_not_give_back_is_refused_by_name() -> None:
    run_distributed(refusals, 2, timeout=400.0)


OPTIONAL = re.compile(
    r"mtp\..*"  # layers for further tokens, which come after the last layer in other models
    r"|model\.layers\.\d+\..*"
    r"|.*\.self_attn\.(q_proj|q_a_proj|q_a_layernorm|q_b_proj|q_norm|k_norm)\.weight"  # one of two kinds of queries
    r"|.*\.mlp\.(gate_proj|up_proj|down_proj)\.weight"  # dense layers, which not every model of a family has
    r"|.*\.mlp\.shared_experts?[._]gate\.weight"
)
"""Mappings of Megatron Bridge for other models of a family."""


def names(rank: int, world_size: int) -> None:
    """Every weight of the tiny model of each family stands in the table of Megatron Bridge, which NVIDIA wrote."""
    import_bridge()
    from megatron.bridge import AutoBridge

    compared = []
    for name in TINY:
        hf_config = family_config(name)
        hf_class = get_family(hf_config).hf_class
        # The table has the tensors of all experts of gpt-oss, and ours the weights of each.
        is_joined = get_family(hf_config).fused_experts.is_interleaved
        if is_joined or hf_class not in AutoBridge.list_supported_models():
            continue
        hf_config.architectures = [hf_class]
        hf_config.mlp_only_layers = []  # as published
        bridge = AutoBridge.from_hf_config(hf_config)._model_bridge
        bridge.hf_config = hf_config
        mapped = [mapping.hf_param for mapping in bridge.mapping_registry().get_all_mappings()]
        theirs = {part for each in mapped for part in ([each] if isinstance(each, str) else each.values())}
        ours = {re.sub(r"\.\d+(?=\.)", ".*", weight) for weight in weight_shapes(hf_config)}
        assert ours <= theirs, (name, ours - theirs)
        assert not {weight for weight in theirs - ours if not OPTIONAL.fullmatch(weight)}, name
        compared.append(name)
    assert {"qwen3_next", "qwen3_5_moe_text", "minimax_m2", "glm4_moe_lite", "kimi_k2", "olmoe"} <= set(compared)


def test_names_are_those_of_megatron_bridges_tables() -> None:
    run_distributed(names, 1)


def checkpoints(rank: int, world_size: int, folder: str) -> None:
    """A checkpoint of a provided model is one of our family's model, and the other way round."""
    platform = import_bridge()
    from megatron.core import parallel_state

    builtin = {"family": "qwen3_moe"}
    for source, target in ((PROVIDED, builtin), (builtin, PROVIDED)):
        case = Case(TP, **source)
        saved = build_trainer(case, hf_reference(False, family=case.family), platform, "fp32")
        for parameter in saved.models[0].parameters():
            parameter.data += 1.0
        expected = on_cpu(saved.export_weights())
        path = saved.save(Path(folder) / case.provider, 1, {}, keep=1).path
        parallel_state.destroy_model_parallel()
        case = Case(EP, **target)
        loaded = build_trainer(case, hf_reference(False, family=case.family), platform, "fp32")
        loaded.load(path, same_layout=False)
        actual = on_cpu(loaded.export_weights())
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[name], weight) for name, weight in expected.items())
        dist.barrier()
        parallel_state.destroy_model_parallel()


def test_checkpoints_are_those_of_our_families(tmp_path: Path) -> None:
    run_distributed(checkpoints, 2, str(tmp_path))


SINKS = PROVIDED | {"family": "gpt_oss"}


def unmark_sinks() -> None:
    """Leave attention sinks without a mark, as Transformer Engine's layers do (Megatron-LM#5916)."""
    from megatron.core.models.gpt import GPTModel

    init = GPTModel.__init__

    def unmarked(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        for name, parameter in self.named_parameters():
            if name.endswith(".softmax_offset"):
                parameter.tensor_model_parallel = False

    GPTModel.__init__ = unmarked


def marks(rank: int, world_size: int) -> None:
    """The gradient norm counts a marked parameter on every rank, and any other on the first rank alone."""
    platform = import_bridge()
    from megatron.core import parallel_state

    from megatron_dppo.mcore.megatron_bridge import ProvidedWeights

    unmark_sinks()
    for case in (Case(TP, **PROVIDED), Case(TP | EP | {"expert_tensor_parallel_size": 1}, **SINKS)):
        model = hf_reference(False, family=case.family)
        if case.family == "gpt_oss":
            # Megatron Bridge maps its weights for Transformer Engine's layers alone. Random ones show what is split.
            ProvidedWeights.load = lambda self, source: None  # type: ignore[method-assign]
        trainer = build_trainer(case, model, platform, "fp32")
        num_sinks = 0
        for name, parameter in trainer.models[0].named_parameters():
            parts = [torch.empty_like(parameter) for _ in range(world_size)]
            dist.all_gather(parts, parameter.detach().contiguous(), group=trainer.groups.tp)
            is_sink = name.endswith(".softmax_offset")
            num_sinks += is_sink
            if case.family == "gpt_oss" and not is_sink and parameter.min() == parameter.max():
                continue  # biases and norms begin as constants, split or not
            # All ranks draw the same numbers for them.
            is_split = len(parameter) < model.config.num_attention_heads if is_sink else not torch.equal(*parts)
            assert getattr(parameter, "tensor_model_parallel", False) == is_split, (case.family, name)
        assert num_sinks == (model.config.num_hidden_layers if case.family == "gpt_oss" else 0)
        dist.barrier()
        parallel_state.destroy_model_parallel()


def test_a_parameter_is_marked_exactly_if_tensor_parallelism_splits_it() -> None:
    run_distributed(marks, 2, timeout=400.0)

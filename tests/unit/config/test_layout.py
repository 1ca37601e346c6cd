from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from megatron_dppo.config.layout import Layout, LinearAttentionShape, ModelShape, format_layout, resolve_layout
from megatron_dppo.errors import ConfigError
from tests.unit.configs import config

MOE = ModelShape(
    family="qwen3_moe",
    num_layers=8,
    num_attention_heads=16,
    num_query_groups=4,
    num_experts=8,
    hidden_size=64,
    vocab_size=100,
)
DENSE = replace(MOE, num_experts=None)
LINEAR = LinearAttentionShape(layers=(0,), num_key_heads=4, num_value_heads=8, key_head_dim=8, value_head_dim=8)
NAMES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}


def layout(world: int, shape: ModelShape = MOE, sections: dict[str, Any] | None = None, **parallel: Any) -> Layout:
    """The layout of ``world`` processes; parallel sizes by their short names."""
    section = {NAMES.get(name, name): value for name, value in parallel.items()}
    made = config(parallel=section, **(sections or {}))
    return resolve_layout(made.parallel, made.batch, world, shape)


def problems(*arguments: Any, **keywords: Any) -> list[str]:
    with pytest.raises(ConfigError) as error:
        layout(*arguments, **keywords)
    head, *lines = str(error.value).splitlines()
    assert head == "this layout cannot run:"
    return lines


def test_sizes_follow_from_the_number_of_processes() -> None:
    result = layout(16, tp=2, pp=2, ep=4)
    assert (result.tp, result.pp, result.vpp, result.cp, result.dp) == (2, 2, 1, 1, 4)
    assert (result.ep, result.etp, result.expert_dp) == (4, 1, 2)
    assert str(result) == "tp2 pp2 cp1 dp4 ep4 etp1"
    assert str(layout(4, pp=2, vpp=2)) == "tp1 pp2 vpp2 cp1 dp2 ep1 etp1"


def test_every_accepted_layout_uses_each_process_exactly_once() -> None:
    accepted = 0
    for world, tp, pp, ep in product((1, 2, 4, 8), (1, 2, 4), (1, 2, 4), (1, 2, 4)):
        try:
            result = layout(world, tp=tp, pp=pp, ep=ep)
        except ConfigError:
            continue
        accepted += 1
        assert result.tp * result.pp * result.cp * result.dp == world
        assert result.etp * result.ep * result.pp * result.expert_dp == world
    assert accepted > 20


@pytest.mark.parametrize(
    ("parallel", "etp"),
    [({}, 1), ({"tp": 2}, 2), ({"tp": 2, "ep": 2}, 1), ({"ep": 2}, 1), ({"tp": 2, "ep": 2, "etp": 2}, 2)],
)
def test_expert_tensor_parallelism_follows_tensor_parallelism_only_without_expert_parallelism(
    parallel: dict[str, int], etp: int
) -> None:
    assert layout(4, **parallel).etp == etp


def test_sequence_parallelism_is_on_exactly_with_tensor_parallelism_and_sets_the_padding() -> None:
    alone, split = layout(4), layout(4, tp=4)
    assert (alone.sequence_parallel, alone.row_multiple) == (False, 1)
    assert (split.sequence_parallel, split.row_multiple) == (True, 4)
    off = layout(4, DENSE, tp=4, sequence_parallel=False)
    assert (off.sequence_parallel, off.row_multiple) == (False, 1)


def test_overlapped_p2p_is_on_exactly_with_an_interleaved_pipeline() -> None:
    assert not layout(2).overlap_p2p_comm
    assert not layout(2, pp=2).overlap_p2p_comm
    assert layout(2, pp=2, vpp=2).overlap_p2p_comm
    assert layout(2, pp=2, vpp=2, overlap_p2p_comm=True).overlap_p2p_comm


@pytest.mark.parametrize(
    ("world", "shape", "parallel", "message"),
    [
        (
            6,
            MOE,
            {"tp": 2, "pp": 2, "etp": 1},
            "tensor * pipeline * context parallel size = 2 * 2 * 1 = 4 does not divide the 6 processes; "
            "start a multiple of 4",
        ),
        (
            4,
            MOE,
            {"ep": 8},
            "expert tensor * expert * pipeline parallel size = 1 * 8 * 1 = 8 does not divide the 4 processes; "
            "start a multiple of 8",
        ),
        (2, MOE, {"sequence_parallel": True}, "sequence_parallel = true ... tensor_model_parallel_size = 1"),
        (2, MOE, {"overlap_param_gather": True}, "overlap_param_gather = true needs use_distributed_optimizer and"),
        (
            2,
            MOE,
            {"overlap_param_gather": True, "overlap_grad_reduce": True, "use_distributed_optimizer": False},
            "overlap_param_gather = true needs",
        ),
        (
            3,
            replace(DENSE, num_query_groups=3),
            {"tp": 3},
            "16 attention heads ... tensor_model_parallel_size = 3 (16 / 3 = 5.33333)",
        ),
        (
            8,
            replace(DENSE, linear=LINEAR),
            {"tp": 2, "cp": 4},
            "4 key heads of linear attention ... tensor_model_parallel_size * context_parallel_size = 8 (4 / 8 = 0.5)",
        ),
        (8, DENSE, {"tp": 8}, "4 query groups are not a multiple of ... = 8 (4 / 8 = 0.5)"),
        (3, MOE, {"pp": 3}, "8 layers are not a multiple of pipeline * virtual pipeline size = 3 (8 / 3"),
        (2, MOE, {"pp": 2, "vpp": 3}, "8 layers are not a multiple of ... = 6 (8 / 6"),
        (4, MOE, {"pp": 2, "vpp": 8}, "8 layers ... = 16 (8 / 16 = 0.5); lower one of them"),
        (
            4,
            replace(MOE, num_layers=94),
            {"pp": 4},
            "(94 / 4 = 23.5); split them unevenly: --model.transformer.num_layers_in_last_pipeline_stage 22",
        ),
        (4, replace(MOE, num_experts=6), {"ep": 4}, "6 experts ... expert_model_parallel_size = 4 (6 / 4 = 1.5)"),
        (2, DENSE, {"ep": 2}, "expert_model_parallel_size = 2, but the model has no experts"),
        (2, MOE, {"vpp": 2}, "virtual_pipeline_model_parallel_size = 2 needs pipeline_model_parallel_size above 1"),
        (4, MOE, {"tp": 2, "etp": 1}, "expert_tensor_parallel_size = 1 with tensor_model_parallel_size = 2 and"),
        (4, MOE, {"etp": 2}, "expert_tensor_parallel_size = 2 with tensor_model_parallel_size = 1 and"),
        (4, MOE, {"pp": 2, "overlap_p2p_comm": True}, "overlap_p2p_comm = true needs an interleaved pipeline"),
        (4, MOE, {"pp": 2, "vpp": 2, "overlap_p2p_comm": False}, "virtual ... = 2 with overlap_p2p_comm = false"),
        (4, MOE, {"tp": 2, "sequence_parallel": False}, "tensor_model_parallel_size = 2 with sequence_parallel = f"),
    ],
)
def test_an_impossible_layout_is_rejected_with_its_arithmetic(
    world: int, shape: ModelShape, parallel: dict[str, Any], message: str
) -> None:
    (line,) = problems(world, shape, **parallel)
    assert re.search(".*".join(re.escape(part) for part in message.split(" ... ")), line), line


@pytest.mark.parametrize(
    ("world", "sections", "message"),
    [
        (
            3,
            {},
            "rollout.prompts_per_step = 16 is not a multiple of the data parallel size 3 "
            "(3 processes / (tp 1 * pp 1 * cp 1))",
        ),
        (
            16,
            {"train": {"mini_batches": 16}},
            "each data parallel rank has 16 / 16 * 8 = 8 samples, which do not divide into train.mini_batches = 16",
        ),
    ],
)
def test_a_batch_that_does_not_divide_over_the_ranks_is_rejected(
    world: int, sections: dict[str, Any], message: str
) -> None:
    (line,) = problems(world, MOE, sections)
    assert message in line


@pytest.mark.parametrize(
    "split", [{"num_layers_in_last_pipeline_stage": 22}, {"account_for_loss_in_pipeline_split": True}]
)
def test_layers_need_not_divide_where_the_split_is_given(split: dict[str, Any]) -> None:
    made = config(parallel={"pipeline_model_parallel_size": 4}, model={"transformer": split})
    shape = replace(MOE, num_layers=94)
    assert resolve_layout(made.parallel, made.batch, 4, shape, made.model.transformer).pp == 4
    off = dict.fromkeys(split, None)
    with pytest.raises(ConfigError, match="94 layers are not a"):
        resolve_layout(made.parallel, made.batch, 4, shape, off)


def test_all_problems_of_a_layout_are_listed_together() -> None:
    model_and_batch = problems(12, replace(DENSE, num_layers=7), {"rollout": {"prompts_per_step": 7}}, tp=3, pp=2)
    assert len(model_and_batch) == 4
    for line, part in zip(model_and_batch, ("attention heads", "query groups", "layers", "prompts"), strict=True):
        assert part in line
    assert len(problems(6, MOE, tp=4, overlap_param_gather=True)) == 3


def test_the_description_gives_the_batch_arithmetic() -> None:
    made = config(train={"mini_batches": 4, "epochs": 2}, parallel={"tensor_model_parallel_size": 2})
    assert format_layout(resolve_layout(made.parallel, made.batch, 8, MOE), made.batch).splitlines() == [
        "layout   8 processes = tp2 pp1 cp1 dp4 ep1 etp2",
        "rollout  16 prompts x 8 samples = 128 samples a step, 32 on each of 4 data parallel ranks",
        "updates  2 epoch(s) x 4 mini-batches of 32 samples = 8 a step, 80 in 10 steps",
    ]

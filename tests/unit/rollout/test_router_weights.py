"""Combine weights beside the experts: to the bit through every step, checked, refused where there are none."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from honest_answers import CONTRACT, SHAPE, honest
from megatron_dppo.data.replayed_routes import with_all_routes
from megatron_dppo.data.training_samples import RowShape, pack, to_training_sample
from megatron_dppo.errors import ConfigError, ContractViolation
from megatron_dppo.hf.folder import read_hf_config, routing_shape
from megatron_dppo.rollout.response import GrowingColumn
from megatron_dppo.rollout.saved import SchedulerState
from megatron_dppo.types import Prompt, RoutingShape, select_experts, select_weights, with_weights
from megatron_dppo.types.token_columns import ROUTES
from megatron_dppo_engines.route_checks import is_missing, missing_rows
from megatron_dppo_engines.servers.contract import check_generation
from tests.unit.configs import config
from tests.unit.data.test_routing import compact, routes
from tests.unit.engines.test_local_routes import MODEL, generate, router_logits
from tests.unit.streams import unusable

NARROW = replace(SHAPE, weights=True)
WIDE = replace(NARROW, num_experts=300)
Change = Callable[[Tensor], Tensor]


def weighted(tokens: int, shape: RoutingShape = NARROW, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Routes with weights, and the experts and the weights that they are made of."""
    plain = replace(shape, weights=False)
    experts = compact(routes(tokens, plain, seed), plain)
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(experts.shape, generator=generator).softmax(-1)
    return with_weights(experts, weights), experts, weights


@pytest.mark.parametrize(("shape", "width"), [(NARROW, 2 + 8), (WIDE, 2 + 4)])
def test_a_row_holds_k_experts_and_the_bytes_of_k_weights(shape: RoutingShape, width: int) -> None:
    column, experts, weights = weighted(7, shape)
    assert shape.width == width == column.shape[2] and column.dtype == experts.dtype == shape.dtype
    assert torch.equal(select_experts(column, shape), experts) and torch.equal(select_weights(column, shape), weights)
    # One row of one layer, which begins where no fp32 number may.
    assert torch.equal(select_weights(column[3:4, 1:2], shape), weights[3:4, 1:2])
    assert select_weights(missing_rows(2, shape), shape).isnan().all()
    experts[4, 2] = missing_rows(1, shape)[0, 0, :2]
    column = with_weights(experts, weights)
    assert torch.equal(column[4, 2], missing_rows(1, shape)[0, 0]), "missing experts have no weights"
    # 30B-A3B: 48 layers of 8 of 128 experts.
    assert RoutingShape(num_layers=48, num_experts=128, topk=8, weights=True).width * 48 == 384 + 1536


@pytest.mark.parametrize("shape", [NARROW, WIDE])
def test_router_weights_stay_exact_with_their_experts(shape: RoutingShape) -> None:
    first, experts, weights = weighted(4, shape, 1)
    later, more, others = weighted(3, shape, 2)
    column = GrowingColumn(ROUTES, missing_rows(0, shape), 3)
    column.append(first[:3])
    column.append(later[1:])
    grown = column.tensor
    expected = torch.cat([weights[:3], others[1:]])
    assert torch.equal(select_weights(grown, shape), expected), "what was known of a token stays"
    samples = [
        to_training_sample([5, 6, 4], [7, 2, 3], None, 0.0, routed_experts=grown),
        to_training_sample([5], [7, 2], None, 0.0),
    ]
    samples = with_all_routes(samples, shape)
    batch = pack(samples, RowShape(row_multiple=8, sequence_multiple=4))
    assert batch.routed_experts is not None
    packed = select_weights(batch.routed_experts, shape)
    assert torch.equal(packed[:5], expected) and packed[5:].isnan().all() and len(packed) == 16
    assert torch.equal(select_experts(batch.routed_experts[:5], shape), torch.cat([experts[:3], more[1:]]))
    with pytest.raises(ValueError, match="and their weights"):
        with_all_routes([to_training_sample([5], [7, 2], None, 0.0, routed_experts=experts[:2])], shape)


def answer(change: Change | None = None, *, norm: bool = True, column: Change | None = None) -> Any:
    """The contract's verdict on an honest answer whose weights were changed."""
    request, given = honest()
    assert given.routed_experts is not None
    shape = replace(NARROW, weights_add_to_one=norm)
    weights = torch.rand(given.routed_experts.shape).softmax(-1) * (1.0 if norm else 0.7)
    weights = weights if change is None else change(weights)
    result = with_weights(given.routed_experts, weights)
    result = result if column is None else column(result)
    return check_generation(
        replace(given, routed_experts=result), replace(request, routing=shape), CONTRACT, "http://s:1"
    )


def put(value: float) -> Change:
    """One weight of row 3 in layer 1."""

    def change(weights: Tensor) -> Tensor:
        weights[3, 1, 0] = value
        return weights

    return change


def without_experts(column: Tensor) -> Tensor:
    column[3, 1, :2] = 255
    return column


def test_valid_router_weights_pass_the_contract() -> None:
    answer()
    answer(norm=False)
    answer(lambda weights: weights.bfloat16().float())
    answer(column=lambda column: torch.cat([missing_rows(2, NARROW), column[2:]]))


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        ({"change": put(math.nan)}, r"row 3, layer 1: \[nan,"),
        ({"change": put(math.inf)}, r"row 3, layer 1: \[inf,"),
        ({"change": put(-0.25)}, r"row 3, layer 1: \[-0.25,"),
        ({"change": put(2.0)}, r"row 3, layer 1: \[2.0,"),
        ({"change": lambda w: w * 0.9}, r"0: .* add up to 1 \(norm_topk_prob\)"),
        ({"change": lambda w: w * 3, "norm": False}, "to at most 1"),
        ({"column": without_experts}, r"3, layer 1: .* of experts \[255, 255\]"),
        ({"column": lambda c: c[..., :2].clone()}, "3 layers, 2 experts a token"),
        ({"column": lambda c: c[..., :6].clone()}, r"of shape \(16, 3, 6\)"),
        ({"column": lambda c: c[1:].clone()}, "routed experts of 15"),
        ({"column": lambda c: c.long()}, "of type torch.int64"),
    ],
)
def test_invalid_router_weights_are_refused_with_their_position(lie: dict[str, Any], said: str) -> None:
    with pytest.raises(ContractViolation, match=said):
        answer(**lie)


def own_weights(model: Any, tokens: list[int], layer: int) -> Tensor:
    """``[tokens, k]``: what the router's own weights make of its inputs."""
    gate = model.model.layers[layer].mlp.gate
    result = router_logits(model, tokens, layer).double().softmax(-1).topk(gate.top_k, dim=-1).values
    return result / result.sum(-1, keepdim=True) if gate.norm_topk_prob else result


@pytest.mark.parametrize(("norm", "dense_layers"), [(True, [1]), (False, [])])
def test_the_local_engine_reports_the_weights_of_every_token(norm: bool, dense_layers: list[int]) -> None:
    hf_config = read_hf_config(MODEL)
    hf_config.mlp_only_layers, hf_config.norm_topk_prob = dense_layers, norm
    shape = routing_shape(hf_config, weights=True)
    assert shape is not None and shape.weights_add_to_one == norm
    _, plain = generate(hf_config, routed_experts=True)
    model, answers = generate(hf_config, routed_experts=True, router_weights=True)
    for (prompt, completion), (_, experts) in zip(answers, plain, strict=True):
        read = [*prompt.token_ids, *completion.token_ids[:-1].tolist()]
        column = completion.routed_experts
        assert column is not None and column.shape == (len(read), shape.num_layers, shape.width)
        assert torch.equal(select_experts(column, shape), experts.routed_experts)  # type: ignore[arg-type]
        for layer in range(shape.num_layers):
            result = select_weights(column, shape)[:, layer]
            if layer in dense_layers:
                assert result.isnan().all() and is_missing(column[:, layer]).all()
            else:
                torch.testing.assert_close(result.double(), own_weights(model, read, layer), rtol=1e-4, atol=1e-6)


def test_models_without_router_weights_are_refused() -> None:
    on: dict[str, Any] = {"router_replay_weights": True, "epochs": 2}
    with pytest.raises(ConfigError, match="effect with train"):
        config(train=on)
    for engine in ("sglang", "vllm"):
        for replay in ("R3", "compare"):
            with pytest.raises(ConfigError, match=f"rollout.engine = '{engine}': SGLang .* and vLLM"):
                config(train=on | {"router_replay": replay}, rollout={"engine": engine})
        config(train=on | {"router_replay": "recorded"}, rollout={"engine": engine})
    scaled = {"transformer": {"moe_router_topk_scaling_factor": 2.5}}
    with pytest.raises(ConfigError, match=r"moe_router_topk_scaling_factor = 2\.5"):
        config(train=on | {"router_replay": "rollout"}, model=scaled)
    config(train=on | {"router_replay": "recorded"}, model=scaled)
    assert not config(train={"router_replay": "rollout"}).train.router_replay_weights


@pytest.mark.parametrize(
    ("then", "now", "words"), [(False, True, "without the weights"), (True, False, "does not use")]
)
def test_rollouts_sampled_ahead_require_the_same_value_of_the_key(then: bool, now: bool, words: str) -> None:
    stream = SchedulerState(0, 0, {}, [[]], [[]])
    was, of_now = (config(train={"router_replay": "rollout", "router_replay_weights": key}) for key in (then, now))
    assert words in unusable(stream, was.model_dump(mode="json"), of_now)
    assert not unusable(stream, of_now.model_dump(mode="json"), of_now)
    # Runs from before the key had no weights.
    before = was.model_dump(mode="json")
    del before["train"]["router_replay_weights"]
    assert bool(unusable(stream, before, of_now)) == now


def test_a_folder_of_rollouts_keeps_them(tmp_path: Path) -> None:
    from columns import ids, logs
    from megatron_dppo.rollout.store import StoredRollouts, load_groups, save_groups
    from megatron_dppo.types import Completion, FinishReason, Rollout, RolloutGroup

    prompt, column = Prompt(prompt_id="p", text="", token_ids=(1, 2), label=""), weighted(2)[0]
    completion = Completion(
        token_ids=ids([3]),
        logprobs=logs([-1.0]),
        finish_reason=FinishReason.STOP,
        policy_version=0,
        text="",
        routed_experts=column,
    )
    group = RolloutGroup(prompt=prompt, rollouts=(Rollout(prompt=prompt, completion=completion, reward=1.0),))
    save_groups(tmp_path / "r", [StoredRollouts(0, prompt, group)])
    (stored,) = load_groups(tmp_path / "r", lambda position: prompt)
    result = stored.content.rollouts[0].completion.routed_experts  # type: ignore[union-attr]
    assert result is not None and torch.equal(result, column)

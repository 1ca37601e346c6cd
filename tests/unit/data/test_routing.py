"""Routes: compact integers, checks that name the place, growth by parts, alignment, packing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from columns import ids, logs
from megatron_dppo.data.replayed_routes import with_all_routes
from megatron_dppo.data.training_samples import RowShape, pack, to_training_sample
from megatron_dppo.rollout.response import GrowingColumn
from megatron_dppo.rollout.store import StoredRollouts, load_groups, save_groups
from megatron_dppo.types import Completion, Prompt, Rollout, RolloutGroup, RoutingShape
from megatron_dppo.types.token_columns import ROUTES
from megatron_dppo_engines.route_checks import check_routes, compact_routes, is_missing, missing_rows

SHAPE = RoutingShape(num_layers=3, num_experts=8, topk=2)
MIXED = replace(SHAPE, dense_layers=frozenset({1}))
WIDE = replace(SHAPE, num_experts=256)


def routes(tokens: int, shape: RoutingShape = SHAPE, seed: int = 0) -> torch.Tensor:
    """Valid routes as wide integers, random in every layer."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(tokens, shape.num_layers, shape.num_experts, generator=generator)
    return noise.argsort(-1)[..., : shape.topk]


def compact(values: torch.Tensor, shape: RoutingShape = SHAPE) -> torch.Tensor:
    """As an answer's routes are read and checked."""
    result = compact_routes(values, shape, tokens=len(values), request="request 7")
    check_routes(result, shape, tokens=len(values), request="request 7")
    return result


def test_the_dtype_is_the_smallest_that_has_room_for_the_missing_value() -> None:
    sizes = {n: replace(SHAPE, num_experts=n).dtype for n in (8, 255, 256, 1024)}
    assert sizes == {8: torch.uint8, 255: torch.uint8, 256: torch.int16, 1024: torch.int16}


@pytest.mark.parametrize("shape", [SHAPE, WIDE])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_every_integer_type_of_an_engine_gives_the_same_routes(shape: RoutingShape, dtype: torch.dtype) -> None:
    values = routes(5, shape)
    result = compact(values.to(dtype), shape)
    assert result.dtype == shape.dtype and torch.equal(result.long(), values) and not is_missing(result).any()


def test_expert_255_of_256_is_not_a_missing_value() -> None:
    values = torch.tensor([[[255, 0]] * 3], dtype=torch.uint8)
    assert compact(values, WIDE).tolist() == [[[255, 0]] * 3]


def test_minus_one_is_missing_in_every_dtype() -> None:
    values = routes(4)
    values[2, 1] = -1
    for shape in (SHAPE, WIDE):
        result = compact(values, shape)
        assert is_missing(result).nonzero().tolist() == [[2, 1]]


def test_dense_layers_are_missing_whether_the_engine_reports_them_or_not() -> None:
    values = routes(4)
    values[:, 1] = 0  # what an engine leaves in a buffer that no router wrote
    with_them, without = compact(values, MIXED), compact(values[:, [0, 2]], MIXED)
    assert torch.equal(with_them, without) and is_missing(with_them).all(0).tolist() == [False, True, False]
    assert torch.equal(with_them[:, [0, 2]].long(), values[:, [0, 2]])
    assert torch.equal(compact(with_them, MIXED), with_them)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.index_put((torch.tensor(2), torch.tensor(1), torch.tensor(1)), torch.tensor(8)), "not exist: 8"),
        (lambda v: v.index_put((torch.tensor(2), torch.tensor(1), torch.tensor(0)), torch.tensor(-2)), "exist: -2"),
        (lambda v: v.index_put((torch.tensor(2), torch.tensor(1)), torch.tensor([5, 5])), r"twice.*: 5 in \[5, 5\]"),
        (lambda v: v.index_put((torch.tensor(2), torch.tensor(1)), torch.tensor([5, -1])), "hole in a row: 255"),
    ],
)
def test_the_error_of_a_bad_value_has_request_row_layer_and_value(change, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=f"experts, row 2, layer 1: .*{message}"):
        compact(change(routes(4)))


def test_repeated_experts_are_detected_at_every_distance() -> None:
    shape = replace(SHAPE, topk=5)
    for first in range(5):
        for second in range(first + 1, 5):
            values = torch.arange(5).repeat(1, 3, 1)
            values[0, 0, second] = values[0, 0, first]
            with pytest.raises(ValueError, match="twice"):
                compact(values, shape)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (routes(3), "3 tokens for 4 input"),
        (routes(4)[:, :2], r"shape \(4, 2, 2\), expected \[4, 3 layers"),
        (routes(4)[..., :1], "2 experts a token"),
        (routes(4).float(), "type torch.float32, expected integers"),
    ],
)
def test_a_wrong_number_of_tokens_layers_or_experts_is_rejected(values: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=f"request 7: .*{message}"):
        compact_routes(values, SHAPE, tokens=4, request="request 7")


def test_a_dense_layer_with_routes_is_rejected_in_compact_routes() -> None:
    with pytest.raises(ValueError, match="row 0, layer 1: dense"):
        check_routes(routes(2).to(torch.uint8), MIXED, tokens=2, request="r")


@settings(max_examples=50, deadline=None)
@given(turns=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=4))
def test_a_growing_sequence_keeps_the_routes_of_each_token(turns: list[tuple[int, int]]) -> None:
    """Each turn adds (tool or prompt tokens, sampled tokens); a request reads all that is there but its last token."""
    actual = GrowingColumn(ROUTES, compact(routes(0)), turns[0][0])
    expected: list[list[list[int]]] = []
    total = 0
    for version, (given_tokens, sampled) in enumerate(turns):
        total += given_tokens + sampled
        whole = compact(routes(total - 1, seed=version))
        expected += whole[len(expected) :].tolist()
        actual.append(whole[len(actual.rows) :])
    assert actual.tensor.tolist() == expected and len(actual.rows) == total - 1


def test_unreported_tokens_are_missing_and_other_models_are_rejected() -> None:
    first, second = compact(routes(2)), compact(routes(3, seed=1))
    result = GrowingColumn(ROUTES, first[:0], 4)
    result.append(first)
    result.append_fill(2)  # tokens of a tool: read with the next ones
    result.append(second)
    assert torch.equal(result.tensor, torch.cat([first, second]))
    whole = result.complete(4)
    assert isinstance(whole, torch.Tensor) and torch.equal(whole[:5], result.tensor)
    assert is_missing(whole).all(1).tolist() == [False] * 5 + [True] * 2
    with pytest.raises(ValueError, match="Expected routed_experts of form"):
        result.append(compact(routes(1), WIDE))


def test_row_t_belongs_to_input_token_t() -> None:
    given_routes = compact(routes(3))
    sample = to_training_sample([5, 6], [7, 2], [-0.5, -0.25], 1.0, routed_experts=given_routes)
    assert sample.tokens.tolist() == [5, 6, 7] and sample.routed_experts is given_routes
    with pytest.raises(ValueError, match="2 prompt and 2 response"):
        to_training_sample([5, 6], [7, 2], None, 0.0, routed_experts=compact(routes(4)))


@pytest.mark.parametrize("shape", [SHAPE, WIDE])
def test_packed_rows_carry_the_routes_of_their_tokens_and_padding_is_missing(shape: RoutingShape) -> None:
    parts = [compact(routes(3, shape, seed=1), shape), compact(routes(2, shape, seed=2), shape)]
    first = to_training_sample([5, 6], [7, 2], None, 0.0, routed_experts=parts[0])
    second = to_training_sample([8], [9, 2], None, 0.0, routed_experts=parts[1])
    batch = pack([first, second], RowShape(row_multiple=8, sequence_multiple=4))
    assert batch.routed_experts is not None and batch.routed_experts.dtype == shape.dtype
    assert torch.equal(batch.routed_experts[:3], parts[0]) and torch.equal(batch.routed_experts[4:6], parts[1])
    assert is_missing(batch.routed_experts).all(1).tolist() == [False] * 3 + [True] + [False] * 2 + [True] * 2
    assert batch.num_padding == 3
    empty = pack([], RowShape(row_multiple=4), like=first)
    assert empty.routed_experts is not None and is_missing(empty.routed_experts).all() and empty.num_padding == 4


def test_samples_without_routes_get_missing_rows_if_another_sample_has_routes() -> None:
    known = to_training_sample([5], [7, 2], None, 0.0, routed_experts=compact(routes(2)))
    lost = to_training_sample([5, 6], [7, 2], None, 0.0)
    first, second = with_all_routes([known, lost], SHAPE)
    assert first is known and torch.equal(second.routed_experts, missing_rows(3, SHAPE))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="none of 1 samples"):
        with_all_routes([lost], SHAPE)
    with pytest.raises(ValueError, match=r"sample 1: .*4 layers"):
        with_all_routes([lost, known], replace(SHAPE, num_layers=4))


def test_rollouts_of_a_checkpoint_keep_their_routes_bitwise(tmp_path: Path) -> None:
    prompt = Prompt(prompt_id="p", text="", token_ids=(1, 2), label="")
    for shape in (SHAPE, WIDE):
        completion = Completion(
            token_ids=ids([3]),
            logprobs=logs([-1.0]),
            finish_reason="stop",
            policy_version=0,
            text="",
            routed_experts=compact(routes(2, shape), shape),
        )
        group = RolloutGroup(prompt=prompt, rollouts=(Rollout(prompt=prompt, completion=completion, reward=1.0),))
        save_groups(tmp_path / "r", [StoredRollouts(0, prompt, group)])
        (stored,) = load_groups(tmp_path / "r", lambda position: prompt)
        result = stored.content.rollouts[0].completion.routed_experts  # type: ignore[union-attr]
        assert result is not None and result.dtype == shape.dtype and torch.equal(result, completion.routed_experts)  # type: ignore[arg-type]

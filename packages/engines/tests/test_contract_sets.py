"""The contract of sampling masks: honest ones keep it, and every lie is told by request, token and value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from honest_answers import CONTRACT, LENGTH, VOCAB, honest
from megatron_dppo_engines.errors import ContractViolation
from megatron_dppo_engines.responses import SamplingMask
from megatron_dppo_engines.server import GenerateRequest, Generation
from megatron_dppo_engines.servers.contract import check_frame, check_generation

URL, TOP_K = "http://s:1", 12
Sets = list[list[int]]


def filtered(seed: int = 0, topk: int = 4) -> tuple[GenerateRequest, Generation]:
    """``honest`` under filters: the ids above a share of the largest probability, and the sampled one."""
    request, given = honest(seed, topk=VOCAB)
    assert given.topk_token_ids is not None and given.topk_logprobs is not None and given.echo is not None
    sets, ids = [], np.full((LENGTH, topk + 1), -1, np.int32)
    values, logprobs = np.zeros((LENGTH, topk + 1), np.float32), np.zeros(LENGTH, np.float32)
    for row, token in enumerate(given.token_ids.tolist()):
        order, own = given.topk_token_ids[row, :VOCAB].tolist(), given.topk_logprobs[row, :VOCAB].double().numpy()
        count = max(1 + (seed + row) % (TOP_K - 1), order.index(token) + 1)
        allowed = order[:count]
        over = own[:count] - np.log(np.exp(own[:count]).sum())
        logprobs[row] = over[allowed.index(token)]
        ids[row, : min(topk, count)], values[row, : min(topk, count)] = allowed[:topk], over[:topk]
        if token not in allowed[:topk]:
            ids[row, topk], values[row, topk] = token, logprobs[row]
        sets.append(sorted(allowed))
    params = replace(request.params, topk_logprobs=topk, top_p=0.9, return_sampling_mask=True)
    echo = replace(given.echo, best_logprobs=None, best_token_ids=None)
    given = replace(given, echo=echo, logprobs=torch.from_numpy(logprobs), sampling_mask=column(sets))
    topk_columns = (torch.from_numpy(ids), torch.from_numpy(values)) if topk else (None, None)
    return replace(request, params=params), replace(
        given, topk_token_ids=topk_columns[0], topk_logprobs=topk_columns[1]
    )


def column(sets: Sets) -> SamplingMask:
    flat = torch.tensor([i for part in sets for i in part], dtype=torch.int32)
    return SamplingMask(flat, torch.tensor([len(part) for part in sets], dtype=torch.int32))


def lists(given: Generation) -> Sets:
    assert given.sampling_mask is not None
    return [part.tolist() for part in given.sampling_mask.ids.split(given.sampling_mask.counts.tolist())]


@pytest.mark.parametrize("topk", [0, 1, 4, 30])
def test_correct_sampling_masks_pass(topk: int) -> None:
    for seed in range(30):
        request, given = filtered(seed, topk)
        check_generation(given, request, CONTRACT, URL)


def with_set(row: int, change: Callable[[list[int], int], Any]) -> Callable[[Generation], Generation]:
    """``change`` gets the set and the sampled token, and works in place or returns another set."""

    def apply(given: Generation) -> Generation:
        sets = lists(given)
        result = change(sets[row], int(given.token_ids[row]))
        sets[row] = sets[row] if result is None else result
        return replace(given, sampling_mask=column(sets))

    return apply


def put(field: str, place: tuple[int, int], value: float) -> Callable[[Generation], Generation]:
    def apply(given: Generation) -> Generation:
        values = getattr(given, field).clone()
        values[place] = value
        return replace(given, **{field: values})

    return apply


def _counts(given: Generation) -> Generation:
    assert given.sampling_mask is not None
    counts = given.sampling_mask.counts.clone()
    counts[3] += 1
    return replace(given, sampling_mask=SamplingMask(given.sampling_mask.ids, counts))


FRAME: dict[str, tuple[Callable[[Generation], Generation], str]] = {
    "none": (
        lambda g: replace(g, sampling_mask=None),
        "sampling mask is missing, expected the ids that the filters allow",
    ),
    "one fewer": (
        lambda g: replace(g, sampling_mask=column(lists(g)[1:])),
        r"sampling mask is of \[11\] tokens, expected",
    ),
    "counts that do not add up": (_counts, r"sampling mask is of \d+ ids, expected \d+, by their counts"),
    "an id of V": (
        with_set(4, lambda s, _: [*s, VOCAB]),
        "sampling mask, at token 4, is 50, expected an id of 0 to 49",
    ),
    "an id of -1": (with_set(4, lambda s, _: [-1, *s]), "sampling mask, at token 4, is -1, expected an id of 0 to 49"),
    "an id twice": (
        with_set(5, lambda s, t: [*s, t]),
        r"sampling mask, at token 5, is \d+ twice, expected different ids",
    ),
    "not the sampled one": (
        with_set(6, lambda s, t: [i for i in range(VOCAB) if i != t][:5]),
        r"sampling mask, at token 6, is \[.*\] \(5 ids\), expected the sampled token \d+ among them",
    ),
    "an empty one": (
        with_set(7, lambda s, t: []),
        r"sampling mask, at token 7, is \[\] \(0 ids\), expected the sampled",
    ),
}
VALUES: dict[str, tuple[Callable[[Generation], Generation], str]] = {
    "alone, but not certain": (
        with_set(2, lambda s, t: [t]),
        "log-probability 2 is .*: the filters allow only this token",
    ),
    "a Top-K id that was cut": (
        put("topk_token_ids", (11, 0), 1),
        "Top-K, at token 11, is .*, expected ids of the sampling mask",
    ),
    "a slot that should be filled": (put("topk_token_ids", (11, 3), -1), "Top-K, at token 11, is .* then -1"),
    "an id that can never be sampled": (put("topk_logprobs", (11, 3), -np.inf), "Top-K, at token 11, is"),
}


@pytest.mark.parametrize("name", [*FRAME, *VALUES])
def test_a_wrong_sampling_mask_is_named(name: str) -> None:
    lie, message = (FRAME | VALUES)[name]
    for seed in (3, 14):
        request, given = filtered(seed)
        assert len(lists(given)[2]) > 1 and len(lists(given)[11]) >= 4
        with pytest.raises(ContractViolation, match=f"request r1 .*{message}") as caught:
            check_generation(lie(given), request, CONTRACT, URL)
        assert caught.value.url == URL
        if name in FRAME:  # a probe must not compute with it
            with pytest.raises(ContractViolation, match=message):
                check_frame(lie(given), request, CONTRACT, URL)


def test_a_set_that_is_all_in_the_topk_has_all_of_the_mass() -> None:
    request, given = filtered(0, topk=30)
    assert given.topk_logprobs is not None
    lower = replace(given, topk_logprobs=given.topk_logprobs - 0.01, logprobs=given.logprobs - 0.01)
    with pytest.raises(ContractViolation, match=r"log-probability 0 is|is \[0\.99"):
        check_generation(lower, request, CONTRACT, URL)


def test_a_set_of_exactly_k_ids_has_all_of_the_mass() -> None:
    num_rows = 0
    for seed in range(12):
        request, given = filtered(seed)
        assert given.topk_logprobs is not None and given.topk_token_ids is not None
        for row, part in enumerate(lists(given)):
            token = int(given.token_ids[row])
            if len(part) != 4 or int(given.topk_token_ids[row, 3]) == token:
                continue
            num_rows += 1
            values = given.topk_logprobs.clone()
            values[row, 3] -= 0.5  # still the last of falling values, and not the sampled token's
            with pytest.raises(ContractViolation, match=rf"{row}, is \[0\.9?.*a mass of 1"):
                check_generation(replace(given, topk_logprobs=values), request, CONTRACT, URL)
    assert num_rows >= 3


def test_more_ids_than_top_k_and_unrequested_sampling_masks_are_rejected() -> None:
    request, given = filtered(0)
    most = max(len(part) for part in lists(given))
    check_generation(given, replace(request, params=replace(request.params, top_k=most)), CONTRACT, URL)
    with pytest.raises(ContractViolation, match=f"{most} ids, expected at"):
        check_generation(given, replace(request, params=replace(request.params, top_k=most - 1)), CONTRACT, URL)
    with pytest.raises(ContractViolation, match="mask is there"):
        check_generation(
            given, replace(request, params=replace(request.params, return_sampling_mask=False)), CONTRACT, URL
        )

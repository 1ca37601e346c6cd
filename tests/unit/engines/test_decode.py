"""Decoding a batch: every row as if it were alone, whatever its neighbours do."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.data.chat import load_tokenizer
from megatron_dppo.engines.local.decode import Decoded, Sampler, decode
from megatron_dppo.hf.folder import build_hf_model, read_hf_config
from megatron_dppo.types import SamplingParams

MODEL = Path(__file__).parents[3] / "examples/chain_sum/model"
LIMIT = 16
END = set(range(2, 12))
"""so many that rows of a random model end at every step"""
TEXTS = ["7+8-3="] * 12 + ["1="] * 12 + ["9-9-9+4="] * 8


@pytest.fixture(scope="module")
def parts() -> tuple[Any, list[list[int]]]:
    config, tokenizer = read_hf_config(MODEL), load_tokenizer(MODEL)
    return build_hf_model(config, torch.float32, seed=1), [tokenizer(text).input_ids for text in TEXTS]


def sample(parts: Any, **params: Any) -> Decoded:
    model, prompts = parts
    settings = SamplingParams(max_new_tokens=LIMIT, seed=4, **params)
    sampler = Sampler(settings, torch.Generator().manual_seed(settings.seed), len(prompts))
    return decode(
        model,
        prompts,
        sampler,
        max_new_tokens=LIMIT,
        end_tokens=END,
        pad_token=0,
        topk=settings.topk_logprobs,
        return_sampling_mask=settings.return_sampling_mask,
    )


def responses(decoded: Decoded) -> list[list[int]]:
    """The tokens up to and with the first end."""
    result = []
    for row in decoded.tokens.tolist():
        ends = [i for i, token in enumerate(row) if token in END]
        result.append(row[: ends[0] + 1] if ends else row)
    return result


def test_the_batch_has_early_and_late_ends_and_prompts_of_several_lengths(parts: Any) -> None:
    lengths = {len(r) for r in responses(sample(parts))}
    assert min(lengths) <= 2 and max(lengths) >= 8 and len({len(p) for p in parts[1]}) == 3


@pytest.mark.parametrize("params", [{}, {"temperature": 0.7}, {"temperature": 0}])
def test_the_logprobs_are_those_of_each_sequence_alone_in_one_pass(parts: Any, params: dict[str, Any]) -> None:
    model, prompts = parts
    decoded = sample(parts, **params)
    for prompt, response, logprobs in zip(prompts, responses(decoded), decoded.logprobs, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        expected = (logits / (params.get("temperature") or 1.0)).log_softmax(-1)
        torch.testing.assert_close(
            logprobs[: len(response)], expected[range(len(response)), response], atol=2e-5, rtol=0
        )
        if params.get("temperature") == 0:
            assert expected.argmax(-1).tolist() == response


def filtered(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> list[dict[int, float]]:
    """For each row the ids that may be sampled and their log-probabilities, one id at a time."""
    result = []
    for row in (logits.double() / temperature).tolist():
        order = sorted(range(len(row)), key=lambda i: -row[i])[: top_k or len(row)]
        weights = {i: math.exp(row[i] - row[order[0]]) for i in order}
        total, mass, kept = sum(weights.values()), 0.0, []
        for i in order:
            kept.append(i)
            mass += weights[i] / total
            if mass >= top_p:
                break
        kept = [i for i in kept if weights[i] >= min_p]
        norm = math.log(sum(weights[i] for i in kept))
        result.append({i: math.log(weights[i]) - norm for i in kept})
    return result


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(1.0, 3, 1.0, 0.0), (1.0, 0, 0.6, 0.0), (1.0, 0, 1.0, 0.5), (0.7, 5, 0.8, 0.1)],
    ids=["top-k", "top-p", "min-p", "all"],
)
@pytest.mark.parametrize("k", [2, 40])
def test_under_filters_mu_is_the_distribution_after_them_and_the_allowed_ids_are_recorded(
    parts: Any, temperature: float, top_k: int, top_p: float, min_p: float, k: int
) -> None:
    model, prompts = parts
    rules: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    decoded = sample(parts, **rules, topk_logprobs=k, return_sampling_mask=True)
    assert torch.equal(decoded.tokens, sample(parts, **rules).tokens) and sample(parts, **rules).sampling_mask is None
    assert decoded.topk_ids is not None and decoded.topk_logprobs is not None and decoded.sampling_mask is not None
    sizes = []
    for row, (prompt, response) in enumerate(zip(prompts, responses(decoded), strict=True)):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        sets = decoded.sampling_mask[row]
        recorded = sets.ids.split(sets.counts.tolist())
        assert len(recorded) >= len(response)
        for step, allowed in enumerate(filtered(logits, **rules)):
            assert response[step] in allowed and recorded[step].tolist() == sorted(allowed)
            assert float(decoded.logprobs[row, step]) == pytest.approx(allowed[response[step]], abs=5e-5)
            slots = zip(decoded.topk_ids[row, step].tolist(), decoded.topk_logprobs[row, step].tolist(), strict=True)
            result = {i: value for i, value in slots if i >= 0}
            best = sorted(allowed, key=lambda i: -allowed[i])[:k]
            assert set(result) == {*best, response[step]}
            assert all(value == pytest.approx(allowed[i], abs=5e-5) for i, value in result.items())
            sizes.append(len(allowed))
    assert max(sizes) > 2 and min(sizes) < 40


def test_a_row_is_the_same_whenever_its_neighbours_leave_the_batch(parts: Any, monkeypatch: Any) -> None:
    expected = sample(parts)
    for share in (0.0, 1.0):  # nobody leaves; everybody leaves at once
        monkeypatch.setattr("megatron_dppo.engines.local.decode.COMPACTION_SHARE", share)
        assert responses(sample(parts)) == responses(expected)


def test_the_topk_slots_are_the_most_probable_tokens_and_the_sampled_one(parts: Any) -> None:
    model, prompts = parts
    decoded = sample(parts, topk_logprobs=3)
    assert decoded.topk_ids is not None and decoded.topk_logprobs is not None
    seen = set()
    for row, (prompt, response) in enumerate(zip(prompts, responses(decoded), strict=True)):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1)
        for step, token in enumerate(response):
            ids = decoded.topk_ids[row, step].tolist()
            assert ids[:3] == expected[step].topk(3).indices.tolist()
            assert ids[3] == (-1 if token in ids[:3] else token)
            used = [i for i in ids if i >= 0]
            actual = decoded.topk_logprobs[row, step, : len(used)]
            torch.testing.assert_close(actual, expected[step, used], atol=2e-5, rtol=0)
            seen.add(ids[3] >= 0)
    assert seen == {True, False}


def test_decoding_ends_with_its_last_row_or_at_the_limit(parts: Any) -> None:
    decoded = sample(parts)
    longest = max(len(r) for r in responses(decoded))
    assert decoded.tokens.shape == decoded.logprobs.shape == (len(TEXTS), longest)
    model, prompts = parts
    sampler = Sampler(SamplingParams(max_new_tokens=1), torch.Generator(), len(prompts))
    one = decode(model, prompts, sampler, max_new_tokens=1, end_tokens=set(), pad_token=0)
    assert one.tokens.shape == (len(TEXTS), 1) and one.topk_ids is None


def test_rows_have_limits_and_ends_of_their_own_and_are_reported_when_they_reach_them(parts: Any) -> None:
    model, prompts = parts
    free, limits = responses(sample(parts)), [2 + i % 9 for i in range(len(prompts))]
    further = [[[row[0]], [], [*row[2:3], *row[4:5]], []][i % 4] for i, row in enumerate(free)]
    expected = []
    for row, limit, ends in zip(free, limits, further, strict=True):
        length = next((i + 1 for i, token in enumerate(row) if token in ends or token in END), LIMIT)
        expected.append(row[: min(length, limit)])
    lengths = sorted({len(row) for row in expected})
    assert len(lengths) >= 6 and lengths[-1] < max(map(len, free)) and set(map(len, further)) == {0, 1, 2}
    for stop_at in (0, 3, 99):
        finished: list[list[int]] = []

        def should_stop(rows: list[int], finished: list[list[int]] = finished, stop_at: int = stop_at) -> bool:
            finished.append(rows)
            return len(finished) == stop_at

        sampler = Sampler(SamplingParams(max_new_tokens=9, seed=4), torch.Generator().manual_seed(4), len(prompts))
        decoded = decode(
            model,
            prompts,
            sampler,
            max_new_tokens=limits,
            end_tokens=END,
            pad_token=0,
            extra_end_tokens=further,
            should_stop=should_stop,
        )
        steps = lengths[2] if stop_at == 3 else lengths[-1]
        assert decoded.tokens.shape == decoded.logprobs.shape == (len(prompts), steps)
        assert finished == [[i for i, row in enumerate(expected) if len(row) == n] for n in lengths if n <= steps]
        for row, actual in zip(expected, decoded.tokens.tolist(), strict=True):
            assert actual[: len(row)] == row[:steps]


@pytest.mark.parametrize("limits", [0, [0, 5]])
def test_a_limit_below_one_is_refused(parts: Any, limits: Any) -> None:
    model, prompts = parts
    with pytest.raises(ValueError, match="max_new_tokens must be above"):
        sampler = Sampler(SamplingParams(max_new_tokens=1), torch.Generator(), 2)
        decode(model, prompts[:2], sampler, max_new_tokens=limits, end_tokens=END, pad_token=0)


def test_a_large_vocabulary_is_sampled_by_inversion(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_dppo.engines.local import sampler as module

    monkeypatch.setattr(module, "INVERSION_BLOCK", 4_000)
    logits = torch.tensor([[2.0, -torch.inf, 0.0, -1.0, -torch.inf]]).expand(40_000, -1)
    every = torch.arange(len(logits))

    def draw(rows: torch.Tensor, largest_race: int) -> torch.Tensor:
        monkeypatch.setattr(module, "LARGEST_RACE", largest_race)
        generator = torch.Generator().manual_seed(3)
        return Sampler(SamplingParams(max_new_tokens=1), generator, len(logits))(logits[rows], rows)[0]

    tokens = draw(every, 0)
    assert not tokens.equal(draw(every, logits.numel()))
    shares = tokens.bincount(minlength=5).double() / len(logits)
    expected = logits[0].double().softmax(-1)
    # Five standard deviations, which are 0 for tokens that a filter removed.
    assert ((shares - expected).abs() <= 5 * (expected * (1 - expected) / len(logits)).sqrt()).all()
    # The tokens of a row do not depend on which other rows are left.
    some = every[7::3]
    assert draw(some, 0).equal(tokens[some])
    nan = torch.full((1, 5), torch.nan)
    assert Sampler(SamplingParams(max_new_tokens=1), torch.Generator(), 1)(nan, every[:1])[0].tolist() == [4]

"""Data of one recorded step for the report: masked tokens, a scatter of tokens, and some responses by token."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_dppo.report.steps.tokens import UNKNOWN_AGE, Decode, StepTokens, masked_tokens
from megatron_dppo_report.agents import tool_times, turns

PAGE_TOKENS = 240_000
"""Tokens of the page, about 20 bytes each. A browser reads them in a second."""
_POINTS = 60_000
"""Points of all scatter plots of the page."""
_MAX_STEP_POINTS = 1200
_RESPONSES = (2, 10)
"""Minimum and maximum number of responses of a step."""
_MAX_PROMPT_CHARACTERS = 2000
_MAX_MASKED_TOKENS = 12


def step_budget(runs: int, steps: int) -> tuple[int, int]:
    """Return the tokens and points of each of a run's recorded steps, which bound the size of the page."""
    parts = max(1, steps * runs)
    return max(200, PAGE_TOKENS // parts), min(_MAX_STEP_POINTS, max(60, _POINTS // parts))


def step_view(step: StepTokens, decode: Decode | None, budget: tuple[int, int]) -> dict[str, Any]:
    """Return the data of one step, with rounded numbers and each token's text once in ``vocabulary``."""
    most_masked = masked_tokens(step, _MAX_MASKED_TOKENS)
    rows = _chosen(step, budget[0])
    points = _points(step, rows, budget[1])
    spans = [(row, *_span(step, row, budget[0] // len(rows))) for row in rows]
    ids = sorted({each.token_id for each in most_masked} | {int(i) for _, a, b in spans for i in step.ids[a:b]})
    vocabulary_index = {token: i for i, token in enumerate(ids)}
    texts = [f"[{token}]" for token in ids] if decode is None else decode(ids)
    masked = [
        {
            "text": texts[vocabulary_index[each.token_id]],
            "sign": each.sign,
            "count": each.count,
            "of": each.of,
            "share": round(each.share, 4),
            "pi": round(each.pi, 4),
            "mu": round(each.mu, 4),
            "gap": None if each.reward_gap is None else round(each.reward_gap, 3),
            "critical": each.critical,
        }
        for each in most_masked
    ]
    return {
        "samples": len(step.rows),
        "tokens": int(step.trained.sum()),
        "maskedTokens": int(step.masked.sum()),
        "masked": masked,
        "points": points,
        "vocabulary": texts,
        "responses": [_response(step, row, start, stop, vocabulary_index) for row, start, stop in spans],
    }


def _chosen(step: StepTokens, tokens: int) -> list[int]:
    """Return the rows to show: those with the most masked tokens, then the best and the worst."""
    masked = np.bincount(step.sample[step.masked], minlength=len(step.rows))
    rewards = np.array([row["reward"] for row in step.rows], dtype=float)
    mean = max(1.0, float(np.diff(step.starts).mean()))
    count = int(min(max(tokens / mean, _RESPONSES[0]), _RESPONSES[1], len(step.rows)))
    # Two places stay for the best and the worst.
    by_mask = [int(row) for row in np.argsort(-masked, kind="stable") if masked[row]][: max(1, count - 2)]
    by_reward = [int(np.argmax(rewards)), int(np.argmin(rewards)), *range(len(rewards))]
    return list(dict.fromkeys([*by_mask, *by_reward]))[:count]


def _span(step: StepTokens, row: int, most: int) -> tuple[int, int]:
    """Return the range of a row's tokens to show: around its first masked token if the row is too long."""
    start, stop = int(step.starts[row]), int(step.starts[row + 1])
    if stop - start <= most:
        return start, stop
    masked = np.flatnonzero(step.masked[start:stop])
    # A quarter of the shown tokens stand before it.
    first = max(0, int(masked[0]) - most // 4) if len(masked) else 0
    begin = start + min(first, stop - start - most)
    return begin, begin + most


def _response(step: StepTokens, row: int, start: int, stop: int, vocabulary_index: dict[int, int]) -> dict[str, Any]:
    sample = step.rows[row]
    shown = slice(start, stop)
    advantages = step.advantages[shown][step.trained[shown]]
    # One digit per token, as the page's program expects: 0 not trained on, 1 trained with a gradient, 3 masked.
    flags = step.trained[shown].astype(int) + 2 * step.masked[shown].astype(int)
    begin = int(step.starts[row])
    end = int(step.starts[row + 1])
    segment_lengths = sample.get("segment_lengths") or []
    return {
        "sample": sample["sample"],
        "prompt": sample["prompt"][:_MAX_PROMPT_CHARACTERS],
        "promptId": sample["prompt_id"],
        "label": sample["label"][:_MAX_PROMPT_CHARACTERS],
        "reward": sample["reward"] if math.isfinite(sample["reward"]) else None,
        "failed": sample["reward_failed"],
        "failure": (sample.get("failure") or "")[:_MAX_PROMPT_CHARACTERS],
        "parts": [[part["name"], part["value"]] for part in sample.get("reward_parts") or []],
        "segments": len(segment_lengths) or 1,
        "turns": turns(step.given[begin:end], segment_lengths, start - begin, stop - begin),
        "toolTimes": tool_times(sample.get("tool_times") or [], start - begin, stop - begin),
        "finish": sample["finish_reason"],
        "ages": _age_runs(step.ages[shown], step.trained[shown]),
        "update": sample["update"],
        "advantage": float(f"{advantages.mean():.4g}") if len(advantages) else 0.0,
        "masked": int(step.masked[begin:end].sum()),
        "cut": [start - begin, end - stop],
        "first": start - begin,
        "ids": [vocabulary_index[int(token)] for token in step.ids[shown]],
        "pi": _rounded(step.pi[shown]),
        "mu": _rounded(step.mu[shown]),
        "flags": "".join(map(str, flags.tolist())),
    }


def _age_runs(ages: NDArray[np.int32], trained: NDArray[np.bool_]) -> list[list[int]]:
    """Return ``[first index, age]`` of each run of trained tokens of the same known age."""
    indices = np.flatnonzero(trained & (ages != UNKNOWN_AGE))
    known = ages[indices]
    starts = np.flatnonzero(np.diff(known, prepend=UNKNOWN_AGE))
    return [[int(indices[i]), int(known[i])] for i in starts]


def _rounded(values: NDArray[np.float32]) -> list[float]:
    """Return the values in ten-thousandths (four decimal places)."""
    return np.rint(values * 10_000).astype(int).tolist()


def _points(step: StepTokens, rows: list[int], most: int) -> list[list[float]]:
    """Return points ``[|pi - mu|, log10(pi / mu), masked, index of the shown response or -1, index in it]``.

    Masked tokens come first, then every n-th of the others.
    """
    known = step.trained & (step.pi > 0) & (step.mu > 0)
    masked = np.flatnonzero(step.masked & known)
    unmasked = np.flatnonzero(~step.masked & known)
    # Masked tokens get at most half of the points.
    masked = masked[:: max(1, -(-len(masked) // (most // 2)))]
    remaining = max(1, most - len(masked))
    chosen = np.concatenate([unmasked[:: max(1, -(-len(unmasked) // remaining))], masked])
    shown = {row: i for i, row in enumerate(rows)}
    points = []
    for i in chosen.tolist():
        row = int(step.sample[i])
        pi, mu = float(step.pi[i]), float(step.mu[i])
        ratio = float(np.log10(pi / mu))
        where = [shown.get(row, -1), i - int(step.starts[row])]
        points.append([round(abs(pi - mu), 4), round(ratio, 3), int(step.masked[i]), *where])
    return points

"""What a report shows of one recorded step: masked tokens, a scatter of tokens, some responses token by token."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_dppo.report.steps.tokens import Decode, StepTokens, masked_tokens, read_tokens

_TOKENS = 240_000
"""Tokens of a whole page, about 20 bytes each: a browser reads it in a second."""
_POINTS = 60_000
"""Points of all scatters of a page."""
_MOST_POINTS = 1200
"""Of one step."""
_RESPONSES = (2, 10)
"""Responses of a step, at least and at most."""
_PROMPT = 2000
"""Characters of a prompt."""
_EVENT = 12
"""Masked tokens of a step that are listed."""


class Budget:
    """How many tokens and points a step may have, so that the page stays small.

    Args:
        runs: of the page.
    """

    def __init__(self, runs: int) -> None:
        self._runs = runs

    def of_step(self, steps: int) -> tuple[int, int]:
        """Tokens and points of one of so many recorded steps."""
        parts = max(1, steps * self._runs)
        return max(200, _TOKENS // parts), min(_MOST_POINTS, max(60, _POINTS // parts))


def step_view(file: Path, decode: Decode | None, budget: tuple[int, int]) -> dict[str, Any]:
    """The data of one step; numbers rounded, texts of tokens once in ``vocabulary``.

    Args:
        file: of the step.
        decode: texts of tokens; None = their ids are shown.
        budget: tokens and points.

    Raises:
        DataError: the file cannot be read.
    """
    step = read_tokens(file)
    found = masked_tokens(step, _EVENT)
    rows = _chosen(step, budget[0])
    points = _points(step, rows, budget[1])
    spans = [(row, *_span(step, row, budget[0] // len(rows))) for row in rows]
    ids = sorted({each.token_id for each in found} | {int(i) for _, a, b in spans for i in step.ids[a:b]})
    place = {token: i for i, token in enumerate(ids)}
    texts = _texts(ids, decode)
    masked = [
        {
            "text": texts[place[each.token_id]],
            "sign": each.sign,
            "count": each.count,
            "of": each.of,
            "share": round(each.share, 4),
            "pi": round(each.pi, 4),
            "mu": round(each.mu, 4),
            "gap": None if each.reward_gap is None else round(each.reward_gap, 3),
            "critical": each.critical,
        }
        for each in found
    ]
    return {
        "samples": len(step.rows),
        "tokens": int(step.trained.sum()),
        "maskedTokens": int(step.masked.sum()),
        "masked": masked,
        "points": points,
        "vocabulary": texts,
        "responses": [_response(step, row, start, stop, place) for row, start, stop in spans],
    }


def _texts(ids: list[int], decode: Decode | None) -> list[str]:
    return [f"[{token}]" for token in ids] if decode is None else decode(ids)


def _chosen(step: StepTokens, tokens: int) -> list[int]:
    """Rows that are shown: those with the most masked tokens, then the best and the worst."""
    masked = np.bincount(step.sample[step.masked], minlength=len(step.rows))
    rewards = np.array([row["reward"] for row in step.rows], dtype=float)
    mean = max(1.0, float(np.diff(step.starts).mean()))
    count = int(min(max(tokens / mean, _RESPONSES[0]), _RESPONSES[1], len(step.rows)))
    by_mask = [int(row) for row in np.argsort(-masked, kind="stable") if masked[row]][: max(1, count - 2)]
    others = [int(np.argmax(rewards)), int(np.argmin(rewards)), *range(len(rewards))]
    return list(dict.fromkeys([*by_mask, *others]))[:count]


def _span(step: StepTokens, row: int, most: int) -> tuple[int, int]:
    """The tokens of a row that are shown: around its first masked one where it is too long."""
    start, stop = int(step.starts[row]), int(step.starts[row + 1])
    if stop - start <= most:
        return start, stop
    masked = np.flatnonzero(step.masked[start:stop])
    first = max(0, int(masked[0]) - most // 4) if len(masked) else 0
    begin = start + min(first, stop - start - most)
    return begin, begin + most


def _response(step: StepTokens, row: int, start: int, stop: int, place: dict[int, int]) -> dict[str, Any]:
    about, own = step.rows[row], slice(start, stop)
    advantages = step.advantages[own][step.trained[own]]
    flags = step.trained[own].astype(int) + 2 * step.masked[own].astype(int)
    begin, end = int(step.starts[row]), int(step.starts[row + 1])
    return {
        "sample": about["sample"],
        "prompt": about["prompt"][:_PROMPT],
        "promptId": about["prompt_id"],
        "label": about["label"][:_PROMPT],
        "reward": about["reward"] if math.isfinite(about["reward"]) else None,
        "failed": about["reward_failed"],
        "finish": about["finish_reason"],
        "age": about["age"],
        "update": about["update"],
        "advantage": float(f"{advantages.mean():.4g}") if len(advantages) else 0.0,
        "masked": int(step.masked[begin:end].sum()),
        "cut": [start - begin, end - stop],
        "first": start - begin,
        "ids": [place[int(token)] for token in step.ids[own]],
        "pi": _rounded(step.pi[own]),
        "mu": _rounded(step.mu[own]),
        "flags": "".join(map(str, flags.tolist())),
    }


def _rounded(values: NDArray[np.float32]) -> list[float]:
    """Four digits behind the point, in ten-thousandths."""
    return np.rint(values * 10_000).astype(int).tolist()


def _points(step: StepTokens, rows: list[int], most: int) -> list[list[float]]:
    """``[|pi - mu|, log10 of pi / mu, masked, place of the response that is shown or -1, place in it]`` of some
    tokens: all that is masked first, then every n-th of the others."""
    known = step.trained & (step.pi > 0) & (step.mu > 0)
    masked, others = np.flatnonzero(step.masked & known), np.flatnonzero(~step.masked & known)
    masked = masked[:: max(1, -(-len(masked) // (most // 2)))]
    left = max(1, most - len(masked))
    chosen = np.concatenate([others[:: max(1, -(-len(others) // left))], masked])
    shown = {row: i for i, row in enumerate(rows)}
    found = []
    for i in chosen.tolist():
        row = int(step.sample[i])
        pi, mu = float(step.pi[i]), float(step.mu[i])
        ratio = float(np.log10(pi / mu))
        where = [shown.get(row, -1), i - int(step.starts[row])]
        found.append([round(abs(pi - mu), 4), round(ratio, 3), int(step.masked[i]), *where])
    return found

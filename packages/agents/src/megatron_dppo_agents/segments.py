"""Segments of an agent's episode: several sequences of tokens in one completion.

A completion of K segments holds their tokens one after the other, with ``segment_lengths``. So whatever counts tokens,
versions or log-probabilities of a response needs to know nothing of segments. Only what builds sequences for a model
cuts it into ``Completion.segments``.

Example: A conversation of 7 tokens was summarized, and a second one of 5 tokens continued from the summary. The
completion has 12 tokens and ``segment_lengths = (7, 5)``. Its routes have 11 rows: 6 of the first segment, a missing
row for its last token, which the model has not read, and 4 of the second.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from torch import Tensor

from megatron_dppo.types.rollouts import Completion
from megatron_dppo.types.token_columns import TOKEN_COLUMNS, Alignment, TokenColumn, TokenRows


def join_segments(segments: Sequence[Completion], last: int) -> Completion:
    """Return one completion of the tokens of all segments, with text and finish reason of the segment ``last``.

    Each segment has no prompt outside of its tokens, and all have the same columns.
    """
    if len(segments) == 1:
        return segments[0]
    lengths = tuple(len(segment.token_ids) for segment in segments)
    starts = [0, *accumulate(lengths)]
    columns: dict[str, Any] = {
        str(column.response): _join_column(column, segments)
        for column in TOKEN_COLUMNS
        if column.response is not None and getattr(segments[0], column.response) is not None
    }
    spans = [
        span._replace(start=span.start + start, end=span.end + start)
        for segment, start in zip(segments, starts, strict=False)
        for span in segment.policy_versions
    ]
    times = [
        each._replace(position=each.position + start)
        for segment, start in zip(segments, starts, strict=False)
        for each in segment.tool_times
    ]
    return replace(
        segments[last],
        policy_version=max(segment.policy_version for segment in segments),
        policy_versions=tuple(spans),
        segment_lengths=lengths,
        segment_texts=tuple(segment.text for segment in segments),
        tool_times=tuple(times),
        **columns,
    )


def _join_column(column: TokenColumn, segments: Sequence[Completion]) -> TokenRows:
    parts: list[TokenRows] = []
    for index, segment in enumerate(segments):
        rows: TokenRows = getattr(segment, str(column.response))
        parts.append(rows)
        is_followed = index < len(segments) - 1
        if column.alignment == Alignment.INPUTS and is_followed and isinstance(rows, Tensor):
            parts.append(column.filled(1, rows))
    return column.join(parts)

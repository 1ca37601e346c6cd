"""The part of the contract that is about kept sets: what top-p, top-k and min-p left of each token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from megatron_dppo.rollout.server import GenerateRequest, Generation

Breach = Callable[[str, object, str], NoReturn]
"""(field, value, what was expected)"""


class SetsOfAnswer:
    """The kept sets of an answer of R tokens, with their frame checked.

    Args:
        given: the answer.
        request: what was asked.
        vocab_size: ids are below it.
        breach: how it is told that the contract is broken.
    """

    def __init__(self, given: Generation, request: GenerateRequest, vocab_size: int, breach: Breach) -> None:
        self._given, self._params, self._size, self._breach = given, request.params, vocab_size, breach
        if given.kept is None:
            breach("kept sets", "missing", "the ids that the filters left of each token")
        ids, counts = given.kept.ids, given.kept.counts
        if ids.dim() != 1 or counts.dim() != 1 or len(counts) != len(given.token_ids):
            breach("kept sets", f"of {list(counts.shape)} tokens", f"one for each of {len(given.token_ids)}")
        self.ids, self.counts = ids.numpy(), counts.numpy()
        if len(self.counts) and (self.counts.min() < 0 or self.counts.sum() != len(self.ids)):
            breach("kept sets", f"of {len(self.ids)} ids", f"{self.counts.sum()}, by their counts")
        self._rows = np.repeat(np.arange(len(self.counts)), self.counts)
        self._check_frame()

    def _check_frame(self) -> None:
        """Ids of the vocabulary, different in a set; not more than top-k; the sampled token among them."""
        outside = (self.ids < 0) | (self.ids >= self._size)
        if outside.any():
            place = int(outside.argmax())
            self._tell(int(self._rows[place]), self.ids[place], f"an id of 0 to {self._size - 1}")
        self._keys = np.sort(self._rows * self._size + self.ids)
        if (twice := self._keys[1:] == self._keys[:-1]).any():
            row, found = divmod(int(self._keys[int(twice.argmax())]), self._size)
            self._tell(row, f"{found} twice", "different ids")
        most = self._params.top_k or self._size
        if (self.counts > most).any():
            row = int(self.counts.argmax())
            self._tell(row, f"{self.counts[row]} ids", f"{most} at most, the top-k that was asked for")
        tokens = self._given.token_ids.numpy()
        inside = self.holds(np.arange(len(tokens)), tokens)
        if not inside.all():
            row = int((~inside).argmax())
            shown = self.ids[self._rows == row][:8].tolist()
            self._tell(row, f"{shown} ({self.counts[row]} ids)", f"the sampled token {tokens[row]} among them")

    def _tell(self, row: int, value: object, expected: str) -> NoReturn:
        self._breach(f"kept set, at token {row},", value, expected)

    def holds(self, rows: NDArray[Any], ids: NDArray[Any]) -> NDArray[np.bool_]:
        """Whether each id is in the set of its row."""
        wanted = rows * self._size + ids
        places = np.minimum(np.searchsorted(self._keys, wanted), max(len(self._keys) - 1, 0))
        found: NDArray[np.bool_] = self._keys[places] == wanted if len(self._keys) else np.zeros(len(ids), np.bool_)
        return found

    def check_values(self, slack: float) -> None:
        """A token that is alone in its set has probability 1."""
        values = self._given.logprobs.numpy()
        wrong = (self.counts == 1) & ~(np.abs(values) <= slack)
        if wrong.any():
            row = int(wrong.argmax())
            self._breach(f"log-probability {row}", values[row], "0: the filters left this token alone")

    def used_slots(self, ids: NDArray[Any], values: NDArray[Any], slack: float) -> NDArray[np.bool_]:
        """Which of the Top-K ``[R, K]`` are in use: as many as the set has. They are of the set, and where the set has
        no more they hold all of the probability."""
        k = ids.shape[1]
        used = np.arange(k) < np.minimum(self.counts, k)[:, None]
        rows = np.broadcast_to(np.arange(len(ids))[:, None], ids.shape)
        good = np.where(used, (ids >= 0) & (ids < self._size), ids == -1)
        good &= ~used | self.holds(rows.ravel(), ids.ravel()).reshape(ids.shape)
        good &= ~used | np.isfinite(values)
        mass = np.where(used, np.exp(np.where(used, values, 0.0).astype(np.float64)), 0.0).sum(1)
        whole = (self.counts > k) | (np.abs(mass - 1) <= 2 * slack)
        for right, found, expected in (
            (good.all(1), ids, "ids of the kept set with finite values, then -1"),
            (whole, mass[:, None], "a mass of 1: they are the whole kept set"),
        ):
            if not right.all():
                row = int((~right).argmax())
                self._breach(f"Top-K, at token {row},", found[row].tolist(), expected)
        return used

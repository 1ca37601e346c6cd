"""The contract of a response: what holds for every honest answer, whatever the model and the weights are.

A pure function over the columns of one answer. It needs no trainer, so that it can look at every answer; what only the
trainer can tell (whether these are the log-probabilities of the policy) is the probe's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from megatron_dppo.data.routing import check_routes
from megatron_dppo.errors import ContractViolation
from megatron_dppo.rollout.server import GenerateCall, GenerateRequest, Generation, InferenceServer
from megatron_dppo.types import FinishReason

Breach = Callable[[str, object, str], NoReturn]
"""(field, value, what was expected)"""


class SetsOfAnswer:
    """The sampling masks of an answer of R tokens, with their frame checked.

    Args:
        given: the answer.
        request: what was asked.
        vocab_size: ids are below it.
        breach: how it is told that the contract is broken.
    """

    def __init__(self, given: Generation, request: GenerateRequest, vocab_size: int, breach: Breach) -> None:
        self._given, self._params, self._size, self._breach = given, request.params, vocab_size, breach
        if given.sampling_mask is None:
            breach("sampling mask", "missing", "the ids that the filters left of each token")
        ids, counts = given.sampling_mask.ids, given.sampling_mask.counts
        if ids.dim() != 1 or counts.dim() != 1 or len(counts) != len(given.token_ids):
            breach("sampling mask", f"of {list(counts.shape)} tokens", f"one for each of {len(given.token_ids)}")
        self.ids, self.counts = ids.numpy(), counts.numpy()
        if len(self.counts) and (self.counts.min() < 0 or self.counts.sum() != len(self.ids)):
            breach("sampling mask", f"of {len(self.ids)} ids", f"{self.counts.sum()}, by their counts")
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
        self._breach(f"sampling mask, at token {row},", value, expected)

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
            (good.all(1), ids, "ids of the sampling mask with finite values, then -1"),
            (whole, mass[:, None], "a mass of 1: they are the whole sampling mask"),
        ):
            if not right.all():
                row = int((~right).argmax())
                self._breach(f"Top-K, at token {row},", found[row].tolist(), expected)
        return used


_SHOWN = 120
"""Characters of a wrong value in a message."""


@dataclass(frozen=True, kw_only=True)
class Contract:
    """What the answers of the servers of one run are measured by."""

    vocab_size: int
    """V, ids are below it"""
    end_tokens: tuple[int, ...]
    """after which a response is complete, besides those of the request"""
    rounding: float = 1e-4
    """How far two log-probabilities of one distribution may lie apart. Both engines compute them in float32 from one
    row of logits, and send them without loss: those that were measured are equal to the bit. Where the log-softmax is
    taken as ``logit - logsumexp`` the error is that of a logit of some hundreds in float32, about 3e-5, in whatever
    dtype the logits were."""


def check_generation(generation: Generation, request: GenerateRequest, contract: Contract, url: str) -> None:
    """Whether an answer can be the answer to this request.

    Checked are: the server's own echo of the request's name, of the prompt, of both lengths and of what ended it; the
    ids; the log-probabilities; why it ended; the versions; the Top-K; the sampling masks; the routes. The Top-K has
    columns of the K most probable tokens, and a last one for a sampled token that is not among them (``Completion``).

    Args:
        generation: the answer.
        request: what was asked.
        contract: of the run.
        url: the server, for the message.

    Raises:
        ContractViolation: it cannot be; names the field, the value and what was expected.
    """
    check_frame(generation, request, contract, url)
    check_values(generation, request, contract, url)


def checked(contract: Contract) -> GenerateCall:
    """A way to ask servers in this process, which raises ``ContractViolation`` where ``check_generation`` does."""

    async def ask(server: InferenceServer, request: GenerateRequest) -> Generation:
        generation = await server.generate(request)
        check_generation(generation, request, contract, server.url)
        return generation

    return ask


def check_frame(generation: Generation, request: GenerateRequest, contract: Contract, url: str) -> None:
    """The part of ``check_generation`` that looks at no probability: all that a computation on the answer relies on."""
    answer = _Answer(generation, request, contract, url)
    answer.check_echo()
    answer.check_lengths()
    if len(generation.token_ids):
        answer.check_tokens()
        answer.check_columns()
        answer.sets()
        answer.check_routes()


def check_values(generation: Generation, request: GenerateRequest, contract: Contract, url: str) -> None:
    """The rest, of an answer whose frame is right."""
    answer = _Answer(generation, request, contract, url)
    if len(generation.token_ids):
        answer.check_logprobs()
        answer.check_best()
        answer.check_topk()


class _Answer:
    """One answer; each method checks one part of it."""

    def __init__(self, generation: Generation, request: GenerateRequest, contract: Contract, url: str) -> None:
        self._given, self._request, self._contract, self._url = generation, request, contract, url
        self._length = len(generation.token_ids)
        self._slack = contract.rounding

    def _breach(self, field: str, value: object, expected: str) -> NoReturn:
        shown = str(value)
        shown = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "..."
        raise ContractViolation(self._url, self._request.request_id, field, f"is {shown}, expected {expected}")

    def check_echo(self) -> None:
        """What the server says of the request and of its own answer."""
        echo, asked = self._given.echo, self._request
        if echo is None:
            return
        if echo.request_id is not None and echo.request_id != asked.request_id:
            self._breach("request id", repr(echo.request_id), repr(asked.request_id))
        if echo.prompt_length is not None and echo.prompt_length != len(asked.token_ids):
            self._breach("number of prompt tokens", echo.prompt_length, str(len(asked.token_ids)))
        if echo.prompt_token_ids is not None and echo.prompt_token_ids != asked.token_ids:
            place, found, sent = _first_difference(echo.prompt_token_ids, asked.token_ids)
            self._breach(f"prompt token {place}", found, f"{sent}, which was sent")
        if echo.response_length is not None and echo.response_length != self._length:
            self._breach("number of response tokens", self._length, f"{echo.response_length}, by the server's count")

    def check_lengths(self) -> None:
        """As many of everything as there are tokens; spans of versions that cover them; an end that fits."""
        given, length = self._given, self._length
        limit, reason = self._request.params.max_new_tokens, given.finish_reason
        if length > limit:
            self._breach("number of response tokens", length, f"at most {limit}")
        if len(given.logprobs) != length:
            self._breach("number of log-probabilities", len(given.logprobs), f"{length}, one a token")
        if reason == FinishReason.LENGTH and length != limit:
            self._breach("finish reason", f"'length' after {length} tokens", f"{limit} tokens, or another reason")
        if reason not in tuple(FinishReason):
            self._breach("finish reason", repr(reason), "stop, length or abort")
        if not length and reason != FinishReason.ABORT:
            self._breach("finish reason", f"'{reason}' without a token", "'abort', or tokens")
        edges = [0, *(span.end for span in given.versions)]
        whole = [span.start for span in given.versions] == edges[:-1] and edges[-1] == length
        if not whole or any(span.end <= span.start for span in given.versions):
            self._breach("versions", [tuple(span) for span in given.versions], f"spans that cover {length} tokens")

    def check_tokens(self) -> None:
        """Ids of the vocabulary; an end token at the end and nowhere else."""
        tokens, size = self._given.token_ids.numpy(), self._contract.vocab_size
        if tokens.min() < 0 or tokens.max() >= size:
            place = int(((tokens < 0) | (tokens >= size)).argmax())
            self._breach(f"token {place}", tokens[place], f"an id of 0 to {size - 1}")
        ends = {*self._contract.end_tokens, *self._request.stop_token_ids}
        last, inner = int(tokens[-1]), tokens[:-1]
        if (ended := np.isin(inner, list(ends))).any():
            place = int(ended.argmax())
            self._breach(f"token {place}", f"the end token {inner[place]}", f"none before the last of {self._length}")
        echo = self._given.echo
        named = None if echo is None else echo.matched_stop
        if self._given.finish_reason == FinishReason.STOP:
            # A model folder may name end tokens that only the server reads; it says which one it found.
            if named is not None and named != last:
                self._breach("last token", last, f"{named!r}, by which the server says that it ended")
            if named is None and last not in ends:
                self._breach("last token", last, f"an end token ({_few(sorted(ends))}) for the finish reason 'stop'")

    def check_logprobs(self) -> None:
        """Finite, and no probability above 1."""
        values = self._given.logprobs.numpy()
        good = np.isfinite(values) & (values <= self._slack)
        if not good.all():
            place = int((~good).argmax())
            self._breach(f"log-probability {place}", values[place], "a finite number of at most 0")

    def check_best(self) -> None:
        """No sampled token is more probable than the most probable one; that one has one log-probability."""
        echo = self._given.echo
        if echo is None or echo.best_logprobs is None or echo.best_token_ids is None:
            return
        ids, values = echo.best_token_ids[:, None], echo.best_logprobs[:, None]
        self._check_candidates("most probable token", ids, values)

    def check_columns(self) -> None:
        """A Top-K where one was asked for, with K + 1 columns."""
        k = self._request.params.topk_logprobs
        given_ids, given_values = self._given.topk_token_ids, self._given.topk_logprobs
        if not k:
            if given_ids is not None or given_values is not None:
                self._breach("Top-K", "there", "none: it was not asked for")
            return
        if given_ids is None or given_values is None:
            self._breach("Top-K", "missing", f"the {k} most probable tokens")
        shape = (self._length, k + 1)
        if tuple(given_ids.shape) != shape or tuple(given_values.shape) != shape:
            shapes = f"of shape {list(given_ids.shape)} and {list(given_values.shape)}"
            self._breach("Top-K", shapes, f"{list(shape)}: a row a token, K + 1 columns")

    def sets(self) -> SetsOfAnswer | None:
        """The sampling masks, checked; None = they were not asked for."""
        if self._request.params.return_sampling_mask:
            return SetsOfAnswer(self._given, self._request, self._contract.vocab_size, self._breach)
        if self._given.sampling_mask is not None:
            self._breach("sampling mask", "there", "none: they were not asked for")
        return None

    def check_topk(self) -> None:
        """The K most probable tokens, and the sampled one among them or in the last column."""
        k = self._request.params.topk_logprobs
        given_ids, given_values = self._given.topk_token_ids, self._given.topk_logprobs
        if (sets := self.sets()) is not None:
            sets.check_values(self._slack)
        if given_ids is None or given_values is None:
            return
        ids, values = given_ids.numpy(), given_values.numpy()
        used = None if sets is None else sets.used_slots(ids[:, :k], values[:, :k], self._slack)
        inside = self._check_candidates("Top-K", ids[:, :k], values[:, :k], used)
        sampled, logprobs = self._given.token_ids.numpy(), self._given.logprobs.numpy()
        extra = np.where(inside, -1, sampled)
        self._check_rows("Top-K: last id", ids[:, k] == extra, ids[:, k], "the sampled token, where it is no other")
        equal = inside | (np.abs(values[:, k] - logprobs) <= self._slack)
        self._check_rows("Top-K: last value", equal, values[:, k], "the sampled token's log-probability")

    def _check_candidates(
        self, name: str, ids: NDArray[Any], values: NDArray[Any], used: NDArray[np.bool_] | None = None
    ) -> NDArray[np.bool_]:
        """Of the K most probable tokens [R, K]; returns where the sampled one is among them, [R].

        Slots that are not ``used`` (None = all are) hold nothing.
        """
        size, slack = self._contract.vocab_size, self._slack
        if len(ids) != self._length or ids.shape != values.shape:
            self._breach(name, f"of {len(ids)} ids and {len(values)} values", f"{self._length}, one a token")
        in_range = (ids >= 0) & (ids < size)
        if used is not None:  # ids of nothing, all different, that can never be sampled
            in_range |= ~used
            ids, values = np.where(used, ids, -1 - np.arange(ids.shape[1])), np.where(used, values, -np.inf)
        self._check_rows(f"{name}: id", in_range.all(1), ids, f"ids of 0 to {size - 1}")
        ordered = np.sort(ids, axis=1)
        self._check_rows(f"{name}: ids", (ordered[:, 1:] != ordered[:, :-1]).all(1), ids, "different ids")
        # A token that cannot be sampled may stand at the end, as -inf.
        number = (values <= slack) & (values > -np.inf) | np.isneginf(values)
        self._check_rows(f"{name}: value", number.all(1), values, "numbers of at most 0")
        falling = (values[:, 1:] <= values[:, :-1] + slack).all(1)
        self._check_rows(f"{name}: values", falling, values, "falling values")
        mass = np.exp(values.astype(np.float64)).sum(1)
        self._check_rows(f"{name}: mass", mass <= 1 + 2 * slack, mass, "at most 1")
        same = ids == self._given.token_ids.numpy()[:, None]
        inside: NDArray[np.bool_] = same.any(1)
        logprobs = self._given.logprobs.numpy()
        own = values[np.arange(self._length), same.argmax(1)]
        # Equal infinities have no difference; the sampled token's is finite.
        equal = ~inside | (np.abs(np.where(inside, own, 0) - np.where(inside, logprobs, 0)) <= slack)
        wanted = "the log-probability of the sampled token, which is the same token"
        self._check_rows(f"{name}: value of the sampled token", equal, own, wanted)
        below = inside | (logprobs <= values[:, -1] + slack)
        wanted = "at most the lowest of the most probable ones, among which it is not"
        self._check_rows("log-probability of the sampled token", below, logprobs, f"{wanted} ({name})")
        return inside

    def _check_rows(self, field: str, good: NDArray[np.bool_] | np.bool_, values: NDArray[Any], expected: str) -> None:
        if not good.all():
            place = int((~good).argmax())
            self._breach(f"{field}, at token {place},", values[place], expected)

    def check_routes(self) -> None:
        """A row a token that was read, of the model's experts."""
        shape, routes = self._request.routing, self._given.routed_experts
        if shape is None:
            return
        if routes is None:
            self._breach("routed experts", "missing", "the routers' choices of every token that was read")
        rows = len(self._request.token_ids) + self._length - 1 - self._request.routing_start
        try:
            check_routes(routes, shape, tokens=rows, request="routed experts")
        except ValueError as error:
            raise ContractViolation(self._url, self._request.request_id, "routed experts", str(error)) from None


def _first_difference(found: Sequence[int], sent: Sequence[int]) -> tuple[int, int | str, int | str]:
    """The first place at which two sequences differ, and what stands there."""
    place = next((i for i, (a, b) in enumerate(zip(found, sent, strict=False)) if a != b), min(len(found), len(sent)))
    nothing = "missing"
    left = found[place] if place < len(found) else nothing
    right = sent[place] if place < len(sent) else nothing
    return place, left, right


def _few(values: Sequence[int]) -> str:
    return ", ".join(map(str, values[:8])) + (", ..." if len(values) > 8 else "")

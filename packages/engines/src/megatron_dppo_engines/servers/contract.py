"""The contract of a response: what holds for every correct response, whatever the model and the weights are.

The checks are pure functions over the columns of one response. They need no trainer, so every response is checked. Only
the trainer can check that the log-probabilities are those of the policy: see ``weights.probe``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from megatron_dppo_engines.errors import ContractViolation
from megatron_dppo_engines.responses import COLUMN_LIMITS, FinishReason
from megatron_dppo_engines.route_checks import check_routes
from megatron_dppo_engines.sampling_sums import rank_sums
from megatron_dppo_engines.server import GenerateCall, GenerateRequest, Generation, InferenceServer

RaiseViolation = Callable[[str, object, str], NoReturn]
"""Raises ``ContractViolation``. Arguments: field, value, expected value."""
_MIN_ZEROS = 32
"""Tokens of a response that cannot all have a probability of 1."""
_LOWEST_LOGPROB = -104.0
"""Log-probability at the sampling temperature that no sampled token is below. IEEE 754's smallest float32 above 0 is
2^-149, with a logarithm of -103.3: a sampler that draws from float32 probabilities never gives a token below it. One
that works with logits gives a token of probability e^-104 once in e^104 = 1e45 draws."""
_MAX_SHOWN = 120
"""Characters of a wrong value in an error message."""


@dataclass(frozen=True, kw_only=True)
class Contract:
    """Facts about the model that the responses of all servers of a run must agree with."""

    vocab_size: int
    """V; every id is below it."""
    end_tokens: tuple[int, ...]
    """Tokens after which a response is complete, besides those of the request."""
    special_tokens: tuple[int, ...] = ()
    """Special tokens of the tokenizer. A server may stop at one that no file calls an end token: SGLang adds
    ``<|eom_id|>`` by its name."""
    rounding: float = 1e-4
    """Largest difference of two log-probabilities of one distribution. Both engines compute them in float32 from one
    row of logits and send them without loss: measured ones are equal to the bit. A log-softmax computed as
    ``logit - logsumexp`` has the error of a logit of some hundreds in float32, about 3e-5, whatever dtype the logits
    had."""


class SamplingMaskCheck:
    """Checks of the sampling mask of a response of R tokens; the constructor checks its ids and counts."""

    def __init__(
        self, generation: Generation, request: GenerateRequest, vocab_size: int, raise_violation: RaiseViolation
    ) -> None:
        self._generation = generation
        self._params = request.params
        self._vocab_size = vocab_size
        self._raise_violation = raise_violation
        if generation.sampling_mask is None:
            raise_violation("sampling mask", "missing", "the ids that the filters allow for each token")
        ids = generation.sampling_mask.ids
        counts = generation.sampling_mask.counts
        if ids.dim() != 1 or counts.dim() != 1 or len(counts) != len(generation.token_ids):
            raise_violation("sampling mask", f"of {list(counts.shape)} tokens", f"{len(generation.token_ids)} tokens")
        self.ids = ids.numpy()
        self.counts = counts.numpy()
        if len(self.counts) and (self.counts.min() < 0 or self.counts.sum() != len(self.ids)):
            raise_violation("sampling mask", f"of {len(self.ids)} ids", f"{self.counts.sum()}, by their counts")
        self._rows = np.repeat(np.arange(len(self.counts)), self.counts)
        self._check_ids()

    def _check_ids(self) -> None:
        """Check that each set has distinct ids of the vocabulary, at most top-k, and holds the sampled token."""
        is_outside = (self.ids < 0) | (self.ids >= self._vocab_size)
        if is_outside.any():
            index = int(is_outside.argmax())
            self._raise_at(int(self._rows[index]), self.ids[index], f"an id of 0 to {self._vocab_size - 1}")
        # One sorted key for each (row, id) pair makes duplicates neighbors and lookups a binary search.
        self._keys = np.sort(self._rows * self._vocab_size + self.ids)
        if (is_repeated := self._keys[1:] == self._keys[:-1]).any():
            row, repeated_id = divmod(int(self._keys[int(is_repeated.argmax())]), self._vocab_size)
            self._raise_at(row, f"{repeated_id} twice", "different ids")
        limit = self._params.top_k or self._vocab_size
        if (self.counts > limit).any():
            row = int(self.counts.argmax())
            self._raise_at(row, f"{self.counts[row]} ids", f"at most {limit}, the top-k of the request")
        tokens = self._generation.token_ids.numpy()
        is_inside = self.contains(np.arange(len(tokens)), tokens)
        if not is_inside.all():
            row = int((~is_inside).argmax())
            shown = self.ids[self._rows == row][:8].tolist()
            self._raise_at(row, f"{shown} ({self.counts[row]} ids)", f"the sampled token {tokens[row]} among them")

    def _raise_at(self, row: int, value: object, expected: str) -> NoReturn:
        self._raise_violation(f"sampling mask, at token {row},", value, expected)

    def contains(self, rows: NDArray[Any], ids: NDArray[Any]) -> NDArray[np.bool_]:
        """Return for each id whether the sampling filters allow it in its row."""
        if not len(self._keys):
            return np.zeros(len(ids), np.bool_)
        keys = rows * self._vocab_size + ids
        # ``searchsorted`` returns the length for a key above all others.
        positions = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        matches: NDArray[np.bool_] = self._keys[positions] == keys
        return matches

    def check_logprobs(self, tolerance: float) -> None:
        """Check that a token that is alone in its set has probability 1."""
        values = self._generation.logprobs.numpy()
        # Negated, so that NaN counts as wrong.
        is_wrong = (self.counts == 1) & ~(np.abs(values) <= tolerance)
        if is_wrong.any():
            row = int(is_wrong.argmax())
            self._raise_violation(f"log-probability {row}", values[row], "0: the filters allow only this token")

    def check_topk(self, ids: NDArray[Any], values: NDArray[Any], tolerance: float) -> NDArray[np.bool_]:
        """Check the Top-K ``[R, K]`` against the sets; return True for each slot in use, [R, K].

        As many slots as a set has ids are in use. They hold ids of the set. If the set has no more ids than slots, they
        hold all of the probability.
        """
        k = ids.shape[1]
        is_used = np.arange(k) < np.minimum(self.counts, k)[:, None]
        rows = np.broadcast_to(np.arange(len(ids))[:, None], ids.shape)
        is_good = np.where(is_used, (ids >= 0) & (ids < self._vocab_size), ids == -1)
        is_good &= ~is_used | self.contains(rows.ravel(), ids.ravel()).reshape(ids.shape)
        is_good &= ~is_used | np.isfinite(values)
        mass = np.where(is_used, np.exp(np.where(is_used, values, 0.0).astype(np.float64)), 0.0).sum(1)
        # With each log-probability off by the tolerance, the mass is off by about as much.
        has_full_mass = (self.counts > k) | (np.abs(mass - 1) <= 2 * tolerance)
        for is_right, shown, expected in (
            (is_good.all(1), ids, "ids of the sampling mask with finite values, then -1"),
            (has_full_mass, mass[:, None], "a mass of 1: they are all ids of the sampling mask"),
        ):
            if not is_right.all():
                row = int((~is_right).argmax())
                self._raise_violation(f"Top-K, at token {row},", shown[row].tolist(), expected)
        return is_used


def check_generation(generation: Generation, request: GenerateRequest, contract: Contract, url: str) -> None:
    """Check that a response can be the response to a request.

    The checks cover:

    - the server's echo of the request id, the prompt, both lengths and the stop reason;
    - token ids, log-probabilities, finish reason and versions;
    - Top-K, sampling mask and routes.

    The Top-K has columns of the K most probable tokens, and a last one for a sampled token that is not among them
    (``Completion``).

    Args:
        generation: The response.
        request: The request.
        contract: Contract of the run.
        url: URL of the server, for the error message.

    Raises:
        ContractViolation: Names the field, the value and what was expected.
    """
    check_frame(generation, request, contract, url)
    check_values(generation, request, contract, url)


def checked(contract: Contract) -> GenerateCall:
    """Return a function that asks a server, raises where ``check_generation`` does, and adds the ``ranks``."""

    async def ask(server: InferenceServer, request: GenerateRequest) -> Generation:
        generation = await server.generate(request)
        check_generation(generation, request, contract, server.url)
        return replace(generation, ranks=rank_sums(generation, request))

    return ask


def check_frame(generation: Generation, request: GenerateRequest, contract: Contract, url: str) -> None:
    """Run the checks of ``check_generation`` that read no probability, on which any computation relies."""
    response = _ResponseCheck(generation, request, contract, url)
    response.check_echo()
    response.check_lengths()
    if len(generation.token_ids):
        response.check_tokens()
        response.check_columns()
        response.check_topk_columns()
        response.check_sampling_mask()
        response.check_routes()


def check_values(generation: Generation, request: GenerateRequest, contract: Contract, url: str) -> None:
    """Run the remaining checks of ``check_generation``, on a response that passes ``check_frame``."""
    response = _ResponseCheck(generation, request, contract, url)
    if len(generation.token_ids):
        response.check_logprobs()
        response.check_most_probable()
        response.check_topk()


class _ResponseCheck:
    def __init__(self, generation: Generation, request: GenerateRequest, contract: Contract, url: str) -> None:
        self._generation = generation
        self._request = request
        self._contract = contract
        self._url = url
        self._length = len(generation.token_ids)
        self._tolerance = contract.rounding

    def _raise_violation(self, field: str, value: object, expected: str) -> NoReturn:
        shown = str(value)
        shown = shown if len(shown) <= _MAX_SHOWN else shown[:_MAX_SHOWN] + "..."
        raise ContractViolation(self._url, self._request.request_id, field, f"is {shown}, expected {expected}")

    def check_echo(self) -> None:
        """Check what the server reports about the request and its own response."""
        echo = self._generation.echo
        request = self._request
        if echo is None:
            return
        if echo.request_id is not None and echo.request_id != request.request_id:
            self._raise_violation("request id", repr(echo.request_id), repr(request.request_id))
        if echo.prompt_length is not None and echo.prompt_length != len(request.token_ids):
            self._raise_violation("number of prompt tokens", echo.prompt_length, str(len(request.token_ids)))
        if echo.prompt_token_ids is not None and echo.prompt_token_ids != request.token_ids:
            index, received, sent = _first_difference(echo.prompt_token_ids, request.token_ids)
            self._raise_violation(f"prompt token {index}", received, f"{sent}, which was sent")
        if echo.response_length is not None and echo.response_length != self._length:
            expected = f"{echo.response_length}, by the server's count"
            self._raise_violation("number of response tokens", self._length, expected)

    def check_lengths(self) -> None:
        """Check the lengths of all columns, that the versions cover the tokens, and that the finish reason fits."""
        generation = self._generation
        length = self._length
        limit = self._request.params.max_new_tokens
        reason = generation.finish_reason
        if length > limit:
            self._raise_violation("number of response tokens", length, f"at most {limit}")
        if len(generation.logprobs) != length:
            self._raise_violation("number of log-probabilities", len(generation.logprobs), f"{length}, one a token")
        if reason == FinishReason.LENGTH and length != limit:
            value = f"'length' after {length} tokens"
            self._raise_violation("finish reason", value, f"{limit} tokens, or another reason")
        if reason not in tuple(FinishReason):
            self._raise_violation("finish reason", repr(reason), "stop, length or abort")
        if not length and reason != FinishReason.ABORT:
            self._raise_violation("finish reason", f"'{reason}' without a token", "'abort', or tokens")
        spans = generation.versions
        edges = [0, *(span.end for span in spans)]
        is_covered = [span.start for span in spans] == edges[:-1] and edges[-1] == length
        if not is_covered or any(span.end <= span.start for span in spans):
            self._raise_violation("versions", [tuple(span) for span in spans], f"spans that cover {length} tokens")

    def check_tokens(self) -> None:
        """Check that ids are of the vocabulary, and that an end token stands at the end and nowhere else."""
        tokens = self._generation.token_ids.numpy()
        size = self._contract.vocab_size
        if tokens.min() < 0 or tokens.max() >= size:
            index = int(((tokens < 0) | (tokens >= size)).argmax())
            self._raise_violation(f"token {index}", tokens[index], f"an id of 0 to {size - 1}")
        end_tokens = {*self._contract.end_tokens, *self._request.stop_token_ids}
        last = int(tokens[-1])
        inner = tokens[:-1]
        if (is_end := np.isin(inner, list(end_tokens))).any():
            index = int(is_end.argmax())
            expected = f"none before the last of {self._length}"
            self._raise_violation(f"token {index}", f"the end token {inner[index]}", expected)
        echo = self._generation.echo
        stop_reason = None if echo is None else echo.matched_stop
        if self._generation.finish_reason == FinishReason.STOP:
            # A model folder may name end tokens that only the server reads; the server reports which one it met.
            if stop_reason is not None and stop_reason != last:
                self._raise_violation("last token", last, f"{stop_reason!r}, the server's own stop reason")
            # A special token counts only if the server itself names it as the reason.
            if stop_reason is not None:
                end_tokens |= set(self._contract.special_tokens)
            if last not in end_tokens:
                some = ", ".join(map(str, sorted(end_tokens)[:8])) + (", ..." if len(end_tokens) > 8 else "")
                expected = (
                    f"an end token ({some}) for the finish reason 'stop'. If it is one, name "
                    "it in eos_token_id of the model's generation_config.json"
                )
                self._raise_violation("last token", last, expected)

    def check_logprobs(self) -> None:
        """Check that log-probabilities are finite, and no probability is above 1 or too small to be sampled."""
        values = self._generation.logprobs.numpy()
        # A server may report those at temperature 1: log p = T (log p_T + log Z), with Z the sum of p^(1/T) over V ids.
        # For T >= 1, Z is at least 1, so T times the bound holds; for T < 1 it is at least V^(1 - 1/T), and the bound
        # itself holds.
        lowest = _LOWEST_LOGPROB * max(self._request.params.temperature, 1.0)
        is_good = np.isfinite(values) & (values <= self._tolerance)
        if not is_good.all():
            index = int((~is_good).argmax())
            self._raise_violation(f"log-probability {index}", values[index], "a finite number of at most 0")
        if (is_low := values < lowest).any():
            index = int(is_low.argmax())
            expected = f"at least {lowest:g}: float32 has no smaller probability, so this token cannot be sampled"
            self._raise_violation(f"log-probability {index}", values[index], expected)
        # A filter can leave one token at each position; the softmax over a vocabulary cannot, for so long.
        is_drawn = self._request.params.temperature > 0 and not self._request.params.has_filters
        if is_drawn and self._length >= _MIN_ZEROS and not values.any():
            self._raise_violation("log-probabilities", f"0 at all {self._length} tokens", "those of the tokens")

    def check_most_probable(self) -> None:
        """Check that no sampled token is more probable than the most probable one."""
        echo = self._generation.echo
        if echo is None or echo.best_logprobs is None or echo.best_token_ids is None:
            return
        ids = echo.best_token_ids[:, None]
        values = echo.best_logprobs[:, None]
        self._check_candidates("most probable token", ids, values)

    def check_columns(self) -> None:
        for name, (low, high) in COLUMN_LIMITS.items():
            rows = getattr(self._generation, name)
            if name not in self._request.params.columns:
                if rows is not None:
                    self._raise_violation(name, "there", "none: the request does not ask for it")
                continue
            if rows is None:
                self._raise_violation(name, "missing", "a number for each token")
            if tuple(rows.shape) != (self._length,):
                self._raise_violation(name, f"of shape {list(rows.shape)}", f"[{self._length}], a number a token")
            values = rows.numpy()
            is_good = np.isfinite(values) & (values >= low - self._tolerance) & (values <= high + self._tolerance)
            self._check_rows(name, is_good, values, f"a finite number of {low:g} to {high:g}")

    def check_topk_columns(self) -> None:
        """Check that there is a Top-K if the request asks for one, with K + 1 columns."""
        k = self._request.params.topk_logprobs
        ids = self._generation.topk_token_ids
        values = self._generation.topk_logprobs
        if not k:
            if ids is not None or values is not None:
                self._raise_violation("Top-K", "there", "none: the request does not ask for it")
            return
        if ids is None or values is None:
            self._raise_violation("Top-K", "missing", f"the {k} most probable tokens")
        shape = (self._length, k + 1)
        if tuple(ids.shape) != shape or tuple(values.shape) != shape:
            shapes = f"of shape {list(ids.shape)} and {list(values.shape)}"
            self._raise_violation("Top-K", shapes, f"{list(shape)}: a row a token, K + 1 columns")

    def check_sampling_mask(self) -> SamplingMaskCheck | None:
        """Check the sampling mask and return its checker; None if the request does not ask for it."""
        if self._request.params.return_sampling_mask:
            return SamplingMaskCheck(self._generation, self._request, self._contract.vocab_size, self._raise_violation)
        if self._generation.sampling_mask is not None:
            self._raise_violation("sampling mask", "there", "none: the request does not ask for it")
        return None

    def check_topk(self) -> None:
        """Check the K most probable tokens, and that the sampled one is among them or in the last column."""
        k = self._request.params.topk_logprobs
        # ``check_frame`` has run these checks; here the object is needed for its look-ups.
        mask_check = self.check_sampling_mask()
        if mask_check is not None:
            mask_check.check_logprobs(self._tolerance)
        if self._generation.topk_token_ids is None or self._generation.topk_logprobs is None:
            return
        ids = self._generation.topk_token_ids.numpy()
        values = self._generation.topk_logprobs.numpy()
        is_used = None
        if mask_check is not None:
            is_used = mask_check.check_topk(ids[:, :k], values[:, :k], self._tolerance)
        is_inside = self._check_candidates("Top-K", ids[:, :k], values[:, :k], is_used)
        sampled = self._generation.token_ids.numpy()
        logprobs = self._generation.logprobs.numpy()
        last_id = np.where(is_inside, -1, sampled)
        expected = "the sampled token, if it is not in another column"
        self._check_rows("Top-K: last id", ids[:, k] == last_id, ids[:, k], expected)
        is_equal = is_inside | (np.abs(values[:, k] - logprobs) <= self._tolerance)
        self._check_rows("Top-K: last value", is_equal, values[:, k], "the sampled token's log-probability")

    def _check_candidates(
        self, name: str, ids: NDArray[Any], values: NDArray[Any], is_used: NDArray[np.bool_] | None = None
    ) -> NDArray[np.bool_]:
        """Check the K most probable tokens [R, K], in the slots that hold one (all if ``is_used`` is None).

        Returns True where the sampled token is one of the K, [R].
        """
        size = self._contract.vocab_size
        tolerance = self._tolerance
        if len(ids) != self._length or ids.shape != values.shape:
            shapes = f"of {len(ids)} ids and {len(values)} values"
            self._raise_violation(name, shapes, f"{self._length}, one a token")
        is_in_range = (ids >= 0) & (ids < size)
        if is_used is not None:
            # Unused slots get distinct ids that are no token, and probability 0, so that they pass the checks below.
            is_in_range |= ~is_used
            ids = np.where(is_used, ids, -1 - np.arange(ids.shape[1]))
            values = np.where(is_used, values, -np.inf)
        self._check_rows(f"{name}: id", is_in_range.all(1), ids, f"ids of 0 to {size - 1}")
        ordered = np.sort(ids, axis=1)
        self._check_rows(f"{name}: ids", (ordered[:, 1:] != ordered[:, :-1]).all(1), ids, "different ids")
        # A token that cannot be sampled may stand at the end, as -inf.
        is_number = (values <= tolerance) & (values > -np.inf) | np.isneginf(values)
        self._check_rows(f"{name}: value", is_number.all(1), values, "numbers of at most 0")
        is_falling = (values[:, 1:] <= values[:, :-1] + tolerance).all(1)
        self._check_rows(f"{name}: values", is_falling, values, "falling values")
        mass = np.exp(values.astype(np.float64)).sum(1)
        self._check_rows(f"{name}: mass", mass <= 1 + 2 * tolerance, mass, "at most 1")
        is_sampled = ids == self._generation.token_ids.numpy()[:, None]
        is_inside: NDArray[np.bool_] = is_sampled.any(1)
        logprobs = self._generation.logprobs.numpy()
        value_of_sampled = values[np.arange(self._length), is_sampled.argmax(1)]
        # The difference of two infinities is NaN, so rows without the sampled token compare 0 to 0.
        difference = np.where(is_inside, value_of_sampled, 0) - np.where(is_inside, logprobs, 0)
        is_equal = ~is_inside | (np.abs(difference) <= tolerance)
        expected = "the log-probability of the sampled token, which is the same token"
        self._check_rows(f"{name}: value of the sampled token", is_equal, value_of_sampled, expected)
        is_below = is_inside | (logprobs <= values[:, -1] + tolerance)
        expected = f"at most the lowest of the most probable ones, among which it is not ({name})"
        self._check_rows("log-probability of the sampled token", is_below, logprobs, expected)
        return is_inside

    def _check_rows(
        self, field: str, is_good: NDArray[np.bool_] | np.bool_, values: NDArray[Any], expected: str
    ) -> None:
        if not is_good.all():
            index = int((~is_good).argmax())
            self._raise_violation(f"{field}, at token {index},", values[index], expected)

    def check_routes(self) -> None:
        """Check that the routes have one row for each token that was read, with experts of the model."""
        shape = self._request.routing
        routes = self._generation.routed_experts
        if shape is None:
            return
        if routes is None:
            self._raise_violation("routed experts", "missing", "the routers' choices of every token that was read")
        # The last token is sampled but never read, so it has no routes.
        rows = len(self._request.token_ids) + self._length - 1 - self._request.routing_start
        try:
            check_routes(routes, shape, tokens=rows, request="routed experts")
        except ValueError as error:
            raise ContractViolation(self._url, self._request.request_id, "routed experts", str(error)) from None


def _first_difference(received: Sequence[int], sent: Sequence[int]) -> tuple[int, int | str, int | str]:
    """Return the first index at which two sequences differ, and both values there."""
    shorter = min(len(received), len(sent))
    index = next((i for i, (a, b) in enumerate(zip(received, sent, strict=False)) if a != b), shorter)
    received_value = received[index] if index < len(received) else "missing"
    sent_value = sent[index] if index < len(sent) else "missing"
    return index, received_value, sent_value

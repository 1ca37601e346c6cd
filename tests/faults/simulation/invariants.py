"""Invariants of everything that trains, whatever went wrong. Each function returns what is wrong, or nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from megatron_dppo.rollout.batch import CollectedRollouts
from megatron_dppo.rollout.saved import SchedulerState
from megatron_dppo.rollout.store import StoredRollouts
from megatron_dppo.types import Completion, Prompt, RolloutGroup
from megatron_dppo_engines.server import Generation
from tests.faults.simulation import model
from tests.faults.simulation.trainer import reward_of


def check_completion(
    prompt: Prompt, c: Completion, digests: Mapping[int, int], versions: Iterable[int], plan: Any
) -> Iterator[str]:
    """Check that each number of a response is exactly that of the weights which its version means.

    Args:
        prompt: that it answers.
        c: the response.
        digests: of the weights of each version, in this run's own history.
        versions: which ones may train in this step.
        plan: of the run: what was asked for.
    """
    allowed, tokens = set(versions), c.token_ids.tolist()
    logprobs = [] if c.logprobs is None else c.logprobs.tolist()
    yield from _check_shape(tokens, logprobs, c, plan.new_tokens)
    edges = [0, *(span.end for span in c.policy_versions)]
    if [span.start for span in c.policy_versions] != edges[:-1] or edges[-1] != len(tokens):
        yield f"spans {c.policy_versions} of {len(tokens)} tokens"
        return
    for version, *_ in c.policy_versions:
        if version not in allowed:
            yield f"tokens of version {version}, where {sorted(allowed)} may train"
            return
    sequence, first = [*prompt.token_ids, *tokens], len(prompt.token_ids)
    for span in c.policy_versions:
        rows = model.rows_of(sequence[: first + span.end], digests[span.policy_version])
        part = rows[first - 1 + span.start : -1]
        yield from _check_logprobs(part, tokens[span.start : span.end], logprobs[span.start : span.end])
        if plan.topk:
            yield from _check_topk(part, tokens[span.start : span.end], c, span, plan.topk)
        if plan.routing:
            begin = 0 if span.start == 0 else first - 1 + span.start
            yield from _check_routes(rows[begin:-1], c, begin)


def _check_shape(tokens: Sequence[int], logprobs: Sequence[float], c: Completion, limit: int) -> Iterator[str]:
    if not tokens or any(not 0 <= t < model.VOCABULARY for t in tokens):
        yield f"token ids {tokens}"
    if len(tokens) > limit or len(logprobs) != len(tokens):
        yield f"{len(tokens)} tokens and {len(logprobs)} log-probs, limit {limit}"
    if model.END in tokens[:-1]:
        yield f"an end token in the middle of {tokens}"
    ended = bool(tokens) and tokens[-1] == model.END
    if not ended and len(tokens) < limit:
        yield f"a response that was cut off after {len(tokens)} of {limit} tokens"
    # At the limit SGLang says "length" of an end token, too.
    if (c.finish_reason == "stop") != ended and not (ended and len(tokens) == limit):
        yield f"finish reason {c.finish_reason!r} after {tokens[-1:]}"


def _check_logprobs(rows: Sequence[int], tokens: Sequence[int], logprobs: Sequence[float]) -> Iterator[str]:
    if any(not 0 <= t < model.VOCABULARY for t in tokens):
        return
    right = model.logprobs_of(rows, tokens)
    if list(logprobs) != right:
        yield f"log-probs {[round(p, 4) for p in logprobs]}, those of the weights are {[round(p, 4) for p in right]}"


def _check_topk(rows: Sequence[int], tokens: Sequence[int], c: Completion, span: Any, k: int) -> Iterator[str]:
    if c.topk_token_ids is None or c.topk_logprobs is None:
        yield "no Top-K"
        return
    ids, values = c.topk_token_ids[span.start : span.end].numpy(), c.topk_logprobs[span.start : span.end].numpy()
    if not np.array_equal(ids[:, :k], model.RANKED[rows, :k]):
        yield "Top-K ids of other weights or another prefix"
    elif not np.array_equal(values[:, :k], model.RANKED_LOGPROBS[rows, :k]):
        yield "Top-K values of other weights or another prefix"
    for i, token in enumerate(tokens):
        inside = token in ids[i, :k]
        if (ids[i, k] != -1) if inside else (ids[i, k] != token or values[i, k] != model.LOGPROBS[rows[i], token]):
            yield "Top-K: the sampled token's own slot"
            return


def _check_routes(rows: Sequence[int], c: Completion, begin: int) -> Iterator[str]:
    if c.routed_experts is None:
        yield "no routes"
    elif not np.array_equal(c.routed_experts[begin : begin + len(rows)].numpy(), model.ROUTES[rows]):
        yield "routes of other weights, another prefix or another position"


def check_prompts(trained: Mapping[int, Sequence[int]], stream: SchedulerState, left_out: int) -> Iterator[str]:
    """Check that every prompt that was taken from the stream is trained on, waiting, or left out by the rules, once.

    Args:
        trained: positions by step.
        stream: after the last step.
        left_out: groups that the code says it left out or gave up.
    """
    positions = [p for step in trained.values() for p in step]
    carried = [place.position for places in stream.waiting for place in places]
    ahead = [place.position for submissions in stream.submissions for each in submissions for place in each.slots]
    counts = Counter([*positions, *carried, *ahead])
    where = f"trained {trained}, carried {carried}, ahead {ahead}"
    if doubled := sorted(p for p, count in counts.items() if count > 1):
        yield f"prompts {doubled} are there twice ({where})"
    if beyond := sorted(p for p in counts if p >= stream.cursor):
        yield f"prompts {beyond} lie beyond the cursor {stream.cursor}"
    lost = stream.cursor - len(counts)
    if lost != left_out:
        yield f"{lost} prompts are gone, {left_out} were left out ({where}, cursor {stream.cursor})"


def check_groups(groups: Sequence[RolloutGroup], siblings: int, wanted: int) -> Iterator[str]:
    """Check that a step has its groups, each whole."""
    if len(groups) != wanted:
        yield f"{len(groups)} groups, expected {wanted}"
    for group in groups:
        if len(group.rollouts) != siblings:
            yield f"{len(group.rollouts)} siblings of prompt {group.prompt.prompt_id}, expected {siblings}"
        if any(rollout.prompt is not group.prompt for rollout in group.rollouts):
            yield f"a rollout of another prompt among those of {group.prompt.prompt_id}"


def check_scores(group: RolloutGroup) -> Iterator[str]:
    """Check that each reward and text of a group is that of its own response."""
    for rollout in group.rollouts:
        tokens = rollout.completion.token_ids.tolist()
        right = reward_of(group.prompt.text, tokens)
        if (rollout.reward, dict(rollout.reward_parts)) != (right.reward, right.parts) or rollout.reward_failed:
            yield f"reward {rollout.reward} {rollout.reward_parts} of {tokens}, its own is {right.reward} {right.parts}"
        if rollout.completion.text != " ".join(map(str, tokens)):
            yield f"text {rollout.completion.text!r} of {tokens}"


def check_ages(collected: CollectedRollouts, step: int) -> Iterator[str]:
    """Check that ages are what the versions of the tokens say; here each step is one version."""
    ages, tokens = list[int](), Counter[int]()
    for group in collected.groups:
        spans = [span for rollout in group.rollouts for span in rollout.completion.policy_versions]
        for span in spans:
            tokens[step - span.policy_version] += span.end - span.start
        ages.append(max((step - span.policy_version for span in spans), default=0))
    if collected.ages != ages or collected.token_ages != dict(tokens):
        yield f"ages {collected.ages} {collected.token_ages}, by the versions {ages} {dict(tokens)}"


def check_selection(sampled: Sequence[RolloutGroup], count: int, selected: Sequence[RolloutGroup]) -> Iterator[str]:
    """Check that a step has the first groups with different rewards, and the last of the others where it lacks some."""
    with_signal = [g for g in sampled if len({r.reward for r in g.rollouts}) > 1][:count]
    lacking = count - len(with_signal)
    others = [g for g in sampled if len({r.reward for r in g.rollouts}) == 1]
    right = {g.prompt.prompt_id for g in [*with_signal, *(others[-lacking:] if lacking else [])]}
    chosen = [g.prompt.prompt_id for g in sampled if g.prompt.prompt_id in right]
    if [g.prompt.prompt_id for g in selected] != chosen:
        yield f"groups {[g.prompt.prompt_id for g in selected]} are selected, by the rule {chosen}"


def check_surplus(collected: CollectedRollouts, plan: Any) -> Iterator[str]:
    """Check that a step that samples no more groups than it needs has dropped none."""
    if plan.oversample == 1 and not (plan.stopping or plan.dynamic) and any(collected.dropped_groups.values()):
        yield f"a step of {plan.prompts} groups left out {dict(collected.dropped_groups)}"


def held_tokens(contents: Mapping[int, StoredRollouts]) -> dict[str, list[list[int]]]:
    """Tokens of each response of a checkpoint by the prompt's id, siblings in their order."""
    result = {}
    for stored in contents.values():
        content = stored.content
        responses = [r.completion for r in content.rollouts] if isinstance(content, RolloutGroup) else content or ()
        result[stored.prompt.prompt_id] = [response.token_ids.tolist() for response in responses]
    return result


def check_continued(group: RolloutGroup, held: Mapping[str, Sequence[Sequence[int]]]) -> Iterator[str]:
    """Check that responses continue after the tokens that a checkpoint holds of them."""
    for rollout, tokens in zip(group.rollouts, held.get(group.prompt.prompt_id, ()), strict=False):
        result = rollout.completion.token_ids.tolist()
        if result[: len(tokens)] != tokens:
            yield f"a response has the tokens {result}, and the checkpoint holds {tokens} of it"


def check_pool(pool: Any, now: float) -> Iterator[str]:
    """Check that no request waits for an evicted server, and that ``Retry-After`` pauses a server only for so long."""
    for server in pool.servers:
        if server.problem is not None and any(not (task.done() or task.cancelling()) for task in server.in_flight):
            yield f"{server.url} is given up, and a request still waits for it"
        if server.back_off_until - now > _LONGEST_REST:
            yield f"{server.url} gets no request for {server.back_off_until - now:.0f} s"


_LONGEST_REST = 31.0
"""Seconds that a server gets no request, whatever it asks for (docs/engine_details.md)"""


def check_order(trained: Sequence[int], stream: SchedulerState) -> Iterator[str]:
    """Check that a step that takes groups in the order of the stream leaves none before those that it has."""
    pending = [slot.position for submissions in stream.submissions for each in submissions for slot in each.slots]
    if pending and trained and min(pending) < max(trained):
        yield f"groups {trained} are trained on, and {min(pending)} waits"


def check_consistent(generation: Generation) -> Iterator[str]:
    """Check that a response that was taken has probabilities that one distribution can have, as every honest one."""
    tokens, logprobs = generation.token_ids.numpy(), generation.logprobs.double().numpy()
    if not (logprobs <= _EXACT).all():
        yield f"log-probs {logprobs.tolist()}"
    echo = generation.echo
    if echo is not None and echo.best_logprobs is not None and echo.best_token_ids is not None:
        yield from _check_best(tokens, logprobs, echo.best_token_ids[:, None], echo.best_logprobs[:, None])
    if generation.topk_token_ids is not None and generation.topk_logprobs is not None:
        ids, values = generation.topk_token_ids.numpy(), generation.topk_logprobs.double().numpy()
        yield from _check_best(tokens, logprobs, ids[:, :-1], values[:, :-1])


def _check_best(tokens: np.ndarray, logprobs: np.ndarray, ids: np.ndarray, values: np.ndarray) -> Iterator[str]:
    for token, logprob, row, best in zip(tokens, logprobs, ids, values, strict=True):
        if (
            (np.diff(best) > _EXACT).any()
            or np.exp(best.astype(np.float64)).sum() > 1 + _EXACT
            or len(set(row)) < len(row)
        ):
            yield f"best tokens {row.tolist()} with {best.tolist()}"
        inside = row.tolist().index(token) if token in row else -1
        if (inside >= 0 and abs(best[inside] - logprob) > _EXACT) or logprob > best[inside] + _EXACT:
            yield f"log-prob {logprob:.4f} of token {token} beside the best tokens {row.tolist()} with {best.tolist()}"


_EXACT = 1e-3
"""Nats up to which two log-probabilities of one distribution count as equal."""

_HARMLESS = {"crash", "freeze", "slow", "partition", "lose_request", "lose_answer", "reset_before", "reset_after"} | {
    "twice",
    "late",
    "status",
    "junk",
    "kill_trainer",
}
"""Faults that a run has to survive as long as one server is untouched: answers do not come, and none is wrong."""


def must_finish(plan: Any, happened: Sequence[Any], died: Iterable[int] = ()) -> str:
    """Why this run had to finish all its steps; empty when it need not.

    Args:
        plan: of the run.
        happened: faults.
        died: servers that ended by what a trainer asked of them that was killed while it did.
    """
    touched = {fault.server for fault in happened if fault.kind != "kill_trainer"} | set(died)
    refused = any(fault.kind == "status" and fault.choice % 8 == 0 for fault in happened)
    if len(touched) == plan.servers or refused or any(fault.kind not in _HARMLESS for fault in happened):
        return ""
    # A broadcast fails with each of its members. Who broke one attempt waits in the next until the others have the
    # weights, so that as many attempts may be lost as servers were touched, and one more is needed.
    if plan.method == "distributed" and len(touched) >= plan.attempts:
        return ""
    untouched = sorted(set(range(plan.servers)) - touched)
    return f"though nothing ever happened to servers {untouched}"


_NUMBERS = ("log-probs", "Top-K", "routes")
_SMALL = 1e-3
"""Mean |pi - mu| of a step in fp32 up to which the guard takes a difference for rounding (docs/probe.md)."""


def lies_since(happened: Sequence[tuple[float, Any]], since: float) -> bool:
    """Return True if a server could lie after a time at which its weights were proved and its answers right.

    A lie in answers or in the name of weights lasts; weights that changed in place, or came back with a restart under
    another's name, did so at one moment. A server that is no liar, however often it dies or hangs, is never excused.

    Args:
        happened: faults so far, and when each began.
        since: the time.
    """
    return any(
        (fault.kind.startswith("lie:") and at + fault.span >= since)
        or (fault.kind in ("corrupt", "label") and at >= since)
        or (_keeps_name(fault) and at + fault.span >= since)
        for at, fault in happened
    )


def unseen(wrong: Sequence[str], lying: bool, on_policy: bool, difference: float) -> list[str]:
    """Return those that nothing of ours can see between two syncs, because a server lies in numbers that fit together.

    The contract sees what no honest server answers; the guard sees every other number, but for a Top-K beside the
    sampled token, and only in steps whose tokens are all of the current weights and differ by more than rounding.

    Args:
        wrong: of one step.
        lying: whether a server could lie since the oldest weights of the step were proved.
        on_policy: whether all tokens are of the current weights.
        difference: the step's mean |pi - mu|, by the model's table.
    """
    if not lying:
        return []
    shown = _NUMBERS if not on_policy else ("Top-K", "log-probs") if difference <= _SMALL else ("Top-K",)
    return [text for text in wrong if any(f": {name}" in text for name in shown)]


def _keeps_name(fault: Any) -> bool:
    """A restart whose weights have the name of others."""
    return fault.kind == "crash" and fault.choice % 8 in (5, 6)

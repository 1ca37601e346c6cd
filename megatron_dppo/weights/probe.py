"""The probe on the trainer's side: the same tokens on its own shards. Every rank takes part."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from megatron_dppo.data.prompts import PromptDataset
from megatron_dppo.data.routing import count_differences
from megatron_dppo.data.training_samples import to_training_sample
from megatron_dppo.engines.serving.checks import UNUSED
from megatron_dppo.errors import ContractViolation, ServerError
from megatron_dppo.hf.folder import end_tokens
from megatron_dppo.parallel.objects import from_each, from_leader, is_leader
from megatron_dppo.types import SamplingParams, TrainingSample
from megatron_dppo.weights.attempt import ask_each
from megatron_dppo.weights.probe_requests import (
    Expectation,
    LostWeightsError,
    ProbeAnswer,
    ProbeError,
    Reading,
    RouteCounts,
    ask,
)
from megatron_dppo.weights.sync import WeightSync
from megatron_dppo.weights.verdict import judge

if TYPE_CHECKING:
    from megatron_dppo.policy.trainer import PolicyTrainer

_PROBE_TOKENS = 256
"""Enough to fill pages of the prefix cache, so that stale ones show."""
_NEW_TOKENS = 64
_Columns = dict[int, dict[str, Any]]
"""by sample: what this rank knows of a ``Reading``"""


class Findings(NamedTuple):
    """What a probe found, by URL; servers that are as they should be are in neither."""

    wrong: dict[str, str]
    """they answer, but not what training needs"""
    silent: dict[str, str]
    """no answer that could be judged: dead, restarted, too slow, overloaded"""

    def joined(self, others: Findings) -> Findings:
        """Those of two probes."""
        return Findings(others.wrong | self.wrong, others.silent | self.silent)


class Probe:
    """Asks servers for a response, and computes the same on the trainer's own shards.

    Args:
        trainer: whose weights the servers should have.
        params: how the run samples, and what it wants reported.
        hf_config: of the model, for its context and vocabulary.
        tokenizer: of the model.
        prompts: the first of them make the request.
        dtype: the coarser one of engine and trainer.
        micro_batch_tokens: token budget of one packed micro-batch.
    """

    def __init__(
        self,
        trainer: PolicyTrainer,
        params: SamplingParams,
        *,
        hf_config: Any,
        tokenizer: Any,
        prompts: PromptDataset,
        dtype: str,
        micro_batch_tokens: int,
    ) -> None:
        self._trainer = trainer
        self._micro_batch_tokens = micro_batch_tokens
        context = hf_config.max_position_embeddings
        new_tokens = min(_NEW_TOKENS, params.max_new_tokens)
        # What the run's own requests need is all that a server is known to take.
        most = min(_PROBE_TOKENS, context - UNUSED - new_tokens, prompts.longest + params.max_new_tokens - new_tokens)
        text, tokens = _long_prompt(tokenizer, prompts, most)
        self._expected: dict[str, Any] = {
            "prompt": text,
            "prompt_token_ids": tokens,
            "vocab_size": hf_config.vocab_size,
            "end_tokens": tuple(sorted(end_tokens(hf_config, tokenizer))),
            **{name: getattr(params, name) for name in ("temperature", "top_p", "top_k", "min_p")},
            "dtype": dtype,
            "topk_logprobs": params.topk_logprobs,
            "routing": trainer.routing_shape if params.routed_experts else None,
            "max_new_tokens": new_tokens,
        }

    def run(self, sync: WeightSync | None, urls: Sequence[str], version: int) -> Findings:
        """Why servers are not what they should be. A collective; ``sync`` on rank 0."""
        expected, world = Expectation(**self._expected, policy_version=version), self._trainer.groups.world
        found = Findings({}, {})
        answers: list[ProbeAnswer] = []
        if sync is not None:
            # A name that no server knows: one that hangs may still work on the request of another attempt or run.
            name = f"probe-{uuid.uuid4().hex[:12]}"
            answered = sync.run(
                lambda servers: ask_each(servers, lambda server: ask(server, expected, request_id=name)), urls
            )
            for url, answer in answered.items():
                if isinstance(answer, ProbeAnswer):
                    answers.append(answer)
                else:
                    lies = isinstance(answer, ProbeError | ContractViolation) and not isinstance(
                        answer, LostWeightsError
                    )
                    (found.wrong if lies else found.silent)[url] = str(answer)
        found, answers = from_leader(lambda: (found, answers), world)
        if not answers:
            return found
        readings = read_answers(self._trainer, answers, expected, self._micro_batch_tokens)
        return from_leader(lambda: Findings(found.wrong | _problems(answers, expected, readings), found.silent), world)


def _problems(
    answers: Sequence[ProbeAnswer], expected: Expectation, readings: Sequence[Sequence[Reading]]
) -> dict[str, str]:
    wrong = {}
    for answer, reading in zip(answers, readings, strict=True):
        try:
            judge(answer, expected, reading)
        except ServerError as error:
            wrong[answer.url] = str(error)
    return wrong


def read_answers(
    trainer: PolicyTrainer, answers: Sequence[ProbeAnswer], expected: Expectation, budget: int
) -> list[list[Reading]]:
    """What the trainer computes for each response of each answer; every data-parallel rank computes all of them.

    A collective over all ranks; the result is complete on the first rank of each replica, and empty on the others.

    Args:
        trainer: with router replay switched on, if routes are expected.
        answers: of the servers.
        expected: what they were asked.
        budget: tokens of one micro-batch.
    """
    samples = [_sample(expected, generation) for answer in answers for generation in answer.generations]
    packed = trainer.pack(samples, budget)
    found: _Columns = {i: {} for i in range(len(samples))}
    readings, routes = trainer.token_logprobs(packed.batches, None if expected.routing is None else "record")
    for i, where, number in packed.positions(samples):
        mask = samples[i].loss_mask
        if readings:
            columns = {name: None if c is None else c[where] for name, c in readings[number]._asdict().items()}
            found[i] |= {name: _numbers(column, mask) for name, column in columns.items()}
        if routes:
            given = samples[i].routed_experts
            assert given is not None
            found[i]["routes"] = count_differences(given, routes[number][where]).numpy()
    if expected.routing is not None:
        readings, _ = trainer.token_logprobs(packed.batches, "replay")
        for i, where, number in packed.positions(samples) if readings else ():
            found[i]["replayed"] = _numbers(readings[number].logprobs[where], samples[i].loss_mask)
    complete = iter(_together(found, trainer))
    return (
        [[next(complete) for _ in answer.generations] for answer in answers]
        if is_leader(trainer.groups.replica)
        else []
    )


def _sample(expected: Expectation, generation: Any) -> TrainingSample:
    topk = None
    if generation.topk_token_ids is not None:
        topk = (generation.topk_token_ids, generation.topk_logprobs)
    return to_training_sample(
        expected.prompt_token_ids,
        generation.token_ids,
        None,
        0.0,
        topk,
        generation.routed_experts,
        sampling_mask=generation.sampling_mask,
    )


def _numbers(column: Tensor | None, mask: Tensor) -> Any:
    return None if column is None else column.cpu()[mask].double().numpy()


def _together(found: _Columns, trainer: PolicyTrainer) -> list[Reading]:
    """The stages' parts as one; ranks of tensor and context parallelism all know the same."""
    groups = trainer.groups
    mine = found if is_leader(groups.tp) and is_leader(groups.cp) else {}
    stages = [part for part in from_each(mine, groups.replica) if part]
    result = []
    for i in found:
        last = next(part[i] for part in stages if "logprobs" in part[i])
        counts = [RouteCounts(part[i]["routes"]) for part in stages if "routes" in part[i]]
        result.append(
            Reading(
                logprobs=last["logprobs"],
                raw_logprobs=last["raw_logprobs"],
                topk_logprobs=last["id_logprobs"],
                raw_topk_logprobs=last["raw_id_logprobs"],
                best_logprobs=last["best_logprobs"],
                routes=sum(counts, RouteCounts()) if counts else None,
                replayed_logprobs=last.get("replayed"),
            )
        )
    return result


def _long_prompt(tokenizer: Any, prompts: PromptDataset, most: int) -> tuple[str, tuple[int, ...]]:
    """The first prompts one after the other, up to ``most`` tokens, at least one prompt."""
    text, tokens = "", tuple[int, ...]()
    for i in range(len(prompts)):
        longer = text + prompts[i].text
        encoded = tuple(tokenizer.encode(longer, add_special_tokens=False))
        if text and len(encoded) > most:
            break
        text, tokens = longer, encoded
        if len(tokens) >= most:
            break
    return text, tokens

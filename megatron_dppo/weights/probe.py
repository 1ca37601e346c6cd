"""Probe of servers: their responses are compared with the trainer's own computation. A collective of all ranks."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megatron_dppo.data.prompts import PromptDataset
from megatron_dppo.data.training_samples import to_training_sample
from megatron_dppo.errors import ContractViolation, ServerError
from megatron_dppo.hf.folder import end_tokens
from megatron_dppo.parallel.objects import all_gather_objects, broadcast_object, is_leader
from megatron_dppo.types import SamplingParams, TrainingSample
from megatron_dppo.types.model_folder import HfConfig, Tokenizer
from megatron_dppo.weights.attempt import call_all
from megatron_dppo.weights.probe_requests import (
    LostWeightsError,
    ProbeError,
    ProbeExpectation,
    ProbeResponse,
    RouteCounts,
    TrainerReading,
    send_probe,
)
from megatron_dppo.weights.sync import WeightSync
from megatron_dppo.weights.verdict import verify_response
from megatron_dppo_engines.route_checks import count_differences
from megatron_dppo_engines.server import Generation
from megatron_dppo_engines.serving.checks import UNUSED_CONTEXT_TOKENS

if TYPE_CHECKING:
    from megatron_dppo.policy.trainer import PolicyTrainer

_PROBE_TOKENS = 256
"""Prompt tokens of a probe: enough to fill pages of the prefix cache, so that stale pages show."""
_NEW_TOKENS = 64
_Columns = dict[int, dict[str, Any]]
"""Fields of ``TrainerReading`` that this rank has computed, by sample."""


class ProbeFindings(NamedTuple):
    """Servers that failed a probe, by URL."""

    wrong: dict[str, str]
    """Mismatches: the server responds, but not as training needs."""
    silent: dict[str, str]
    """Errors of servers without a response to compare: dead, restarted, too slow, overloaded."""
    differences: tuple[tuple[str, float], ...] = ()
    """URL and mean |p - q| of the servers that passed."""

    def merged(self, other: ProbeFindings) -> ProbeFindings:
        """Return the findings of two probes."""
        return ProbeFindings(other.wrong | self.wrong, other.silent | self.silent, other.differences + self.differences)


class Probe:
    """Requests a response to the first prompts from servers and computes the same with the trainer's own shards."""

    def __init__(
        self,
        trainer: PolicyTrainer,
        params: SamplingParams,
        *,
        hf_config: HfConfig,
        tokenizer: Tokenizer,
        prompts: PromptDataset,
        dtype: str,
        micro_batch_tokens: int,
    ) -> None:
        self._trainer = trainer
        self._micro_batch_tokens = micro_batch_tokens
        context = hf_config.max_position_embeddings
        new_tokens = min(_NEW_TOKENS, params.max_new_tokens)
        # No longer than the run's own requests: a server need not accept more.
        max_tokens = min(
            _PROBE_TOKENS,
            context - UNUSED_CONTEXT_TOKENS - new_tokens,
            prompts.longest + params.max_new_tokens - new_tokens,
        )
        text, tokens = _long_prompt(tokenizer, prompts, max_tokens)
        self._expected: dict[str, Any] = {
            "prompt": text,
            "prompt_token_ids": tokens,
            "vocab_size": hf_config.vocab_size,
            "end_tokens": tuple(sorted(end_tokens(hf_config, tokenizer))),
            "special_tokens": tuple(sorted(getattr(tokenizer, "all_special_ids", ()))),
            **{name: getattr(params, name) for name in ("temperature", "top_p", "top_k", "min_p")},
            "dtype": dtype,
            "topk_logprobs": params.topk_logprobs,
            "routing": trainer.routing_shape if params.routed_experts else None,
            "max_new_tokens": new_tokens,
        }

    def run(self, sync: WeightSync | None, urls: Sequence[str], version: int) -> ProbeFindings:
        """Probe servers and return those that fail. A collective; ``sync`` is given on rank 0."""
        expected = ProbeExpectation(**self._expected, policy_version=version)
        world = self._trainer.groups.world
        findings = ProbeFindings({}, {})
        responses: list[ProbeResponse] = []
        if sync is not None:
            # A new name each time: a hanging server may still work on the request of an earlier attempt or run.
            name = f"probe-{uuid.uuid4().hex[:12]}"
            results = sync.run(
                lambda servers: call_all(servers, lambda server: send_probe(server, expected, request_id=name)), urls
            )
            for url, result in results.items():
                if isinstance(result, ProbeResponse):
                    responses.append(result)
                    continue
                is_mismatch = isinstance(result, ProbeError | ContractViolation)
                # A server that restarted reports its version honestly: it is sent the weights again.
                has_restarted = isinstance(result, LostWeightsError)
                errors = findings.wrong if is_mismatch and not has_restarted else findings.silent
                errors[url] = str(result)
        findings, responses = broadcast_object(lambda: (findings, responses), world)
        if not responses:
            return findings
        readings = compute_readings(self._trainer, responses, expected, self._micro_batch_tokens)

        def with_comparison() -> ProbeFindings:
            wrong, differences = _compare(responses, expected, readings)
            return ProbeFindings(findings.wrong | wrong, findings.silent, tuple(differences.items()))

        return broadcast_object(with_comparison, world)


def _compare(
    responses: Sequence[ProbeResponse],
    expected: ProbeExpectation,
    readings: Sequence[Sequence[TrainerReading]],
) -> tuple[dict[str, str], dict[str, float]]:
    """Return the errors of the servers that fail and the mean |p - q| of those that pass, by URL."""
    mismatches = {}
    differences = {}
    for response, reading in zip(responses, readings, strict=True):
        try:
            result = verify_response(response, expected, reading)
        except ServerError as error:
            mismatches[response.url] = str(error)
        else:
            # Training replays the server's routes if it has them.
            differences[response.url] = (result.replayed or result.logprobs).probability
    return mismatches, differences


def compute_readings(
    trainer: PolicyTrainer, responses: Sequence[ProbeResponse], expected: ProbeExpectation, budget: int
) -> list[list[TrainerReading]]:
    """Compute the trainer's numbers for each generation of each response; every data-parallel rank computes all.

    A collective over all ranks, with router replay switched on, if routes are expected. The result is complete on the
    first rank of each replica, and empty on the others. ``budget`` counts the tokens of one micro-batch.
    """
    samples = [_sample(expected, generation) for response in responses for generation in response.generations]
    packed = trainer.pack(samples, budget)
    columns_by_sample: _Columns = {i: {} for i in range(len(samples))}

    # First pass: live routes, which are compared with the server's.
    readings, routes = trainer.token_logprobs(packed.batches, None if expected.routing is None else "record")
    for i, where, number in packed.positions(samples):
        mask = samples[i].loss_mask
        # The last stage alone has log-probabilities, and each stage the routes of its own layers.
        if readings:
            columns = {name: None if c is None else c[where] for name, c in readings[number]._asdict().items()}
            columns_by_sample[i] |= {name: _to_numpy(column, mask) for name, column in columns.items()}
        if routes:
            server_routes = samples[i].routed_experts
            assert server_routes is not None
            columns_by_sample[i]["routes"] = count_differences(server_routes, routes[number][where]).numpy()

    # Second pass: the server's routes are replayed.
    if expected.routing is not None:
        readings, _ = trainer.token_logprobs(packed.batches, "replay")
        for i, where, number in packed.positions(samples) if readings else ():
            columns_by_sample[i]["replayed"] = _to_numpy(readings[number].logprobs[where], samples[i].loss_mask)
    complete = iter(_merge_stages(columns_by_sample, trainer))
    return (
        [[next(complete) for _ in response.generations] for response in responses]
        if is_leader(trainer.groups.replica)
        else []
    )


def _sample(expected: ProbeExpectation, generation: Generation) -> TrainingSample:
    topk = None
    if generation.topk_token_ids is not None:
        assert generation.topk_logprobs is not None
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


def _to_numpy(column: Tensor | None, mask: Tensor) -> NDArray[np.float64] | None:
    return None if column is None else column.cpu()[mask].double().numpy()


def _merge_stages(columns_by_sample: _Columns, trainer: PolicyTrainer) -> list[TrainerReading]:
    """Merge the columns of all pipeline stages; ranks of tensor and context parallelism have the same ones."""
    groups = trainer.groups
    local = columns_by_sample if is_leader(groups.tp) and is_leader(groups.cp) else {}
    stages = [stage for stage in all_gather_objects(local, groups.replica) if stage]
    result = []
    for i in columns_by_sample:
        # The last stage has the log-probabilities; each stage has the routes of its layers.
        last = next(stage[i] for stage in stages if "logprobs" in stage[i])
        counts = [RouteCounts(stage[i]["routes"]) for stage in stages if "routes" in stage[i]]
        result.append(
            TrainerReading(
                logprobs=last["logprobs"],
                raw_logprobs=last["raw_logprobs"],
                topk_logprobs=last["id_logprobs"],
                raw_topk_logprobs=last["raw_id_logprobs"],
                best_logprobs=last["best_logprobs"],
                routes=RouteCounts.from_stages(counts) if counts else None,
                replayed_logprobs=last.get("replayed"),
            )
        )
    return result


def _long_prompt(tokenizer: Tokenizer, prompts: PromptDataset, max_tokens: int) -> tuple[str, tuple[int, ...]]:
    """Return the first prompts joined, up to ``max_tokens`` tokens and at least one prompt."""
    text = ""
    tokens = tuple[int, ...]()
    for i in range(len(prompts)):
        longer_text = text + prompts[i].text
        longer_tokens = tuple(tokenizer.encode(longer_text, add_special_tokens=False))
        if text and len(longer_tokens) > max_tokens:
            break
        text = longer_text
        tokens = longer_tokens
        if len(tokens) >= max_tokens:
            break
    return text, tokens

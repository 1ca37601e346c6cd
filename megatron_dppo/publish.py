"""The policy's weights to the rollout engine, and the proof that they arrived. Every rank takes part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist

from megatron_dppo.config import Config
from megatron_dppo.data.samples import to_training_sample
from megatron_dppo.errors import PublishError, ServerError
from megatron_dppo.hf import drain
from megatron_dppo.inputs import Inputs
from megatron_dppo.parallel.objects import from_leader
from megatron_dppo.rollout.attempt import SyncResult
from megatron_dppo.rollout.local import LocalEngine
from megatron_dppo.rollout.probe import Expectation, ProbeAnswer, ask, judge
from megatron_dppo.rollout.server_engine import ServerEngine
from megatron_dppo.trainer import PolicyTrainer
from megatron_dppo.weight_sync import WeightSync

_PROBE_TOKENS = 256
"""Enough to fill pages of the prefix cache, so that stale ones show."""


class Publisher(Protocol):
    """Gives the policy's current weights to the engine that samples."""

    def publish(self) -> list[str]:
        """Until the engine has exactly the current version; returns what the user should know. A collective."""

    def close(self) -> None:
        """Free what it holds."""


class LocalPublisher:
    """For an engine in this process; None on ranks that have none."""

    def __init__(self, trainer: PolicyTrainer, engine: LocalEngine | None) -> None:
        self._trainer, self._engine = trainer, engine

    def publish(self) -> list[str]:
        """See ``Publisher``."""
        weights = self._trainer.export_weights()
        if self._engine is not None:
            self._engine.update_weights(weights, self._trainer.policy_version)
        else:
            drain(weights)
        return []

    def close(self) -> None:
        """Nothing."""


@dataclass(frozen=True)
class _Verdict:
    """What rank 0 tells all ranks of an attempt."""

    good: list[str]
    problems: dict[str, str]
    """by URL: the servers that did not get the weights, or do not show them"""
    final: bool
    """whether to go on with these servers"""


class ServerPublisher:
    """For inference servers. Rank 0 sends; all ranks gather the weights and compute the probe.

    A server that fails in a sync gets the weights again, ``attempts`` times in all; then the run goes on without it,
    or, when none is left, stops. One that does not answer at all is left out at once. Either gets its chance at the
    next sync, before it gets any work.

    Args:
        trainer: the policy.
        engine: this rank's; None on ranks that get their rollouts from another one.
        sync: rank 0's; None on all others.
        config: the whole configuration.
        inputs: prompts, tokenizer and sizes for the probe.
    """

    def __init__(
        self,
        trainer: PolicyTrainer,
        engine: ServerEngine | None,
        sync: WeightSync | None,
        config: Config,
        inputs: Inputs,
    ) -> None:
        self._trainer, self._engine, self._sync, self._config = trainer, engine, sync, config
        self._probe = Probe(trainer, config, inputs)
        self._published = 0

    def publish(self) -> list[str]:
        """See ``Publisher``.

        Raises:
            PublishError: no server could be given the weights, or one of them answers with other weights.
        """
        settings, version = self._config.rollout.weight_sync, self._trainer.policy_version
        probes = self._published == 0 or (settings.probe_every and self._published % settings.probe_every == 0)
        notes: list[str] = []
        for attempt in range(1, settings.attempts + 1):
            verdict = self._attempt(version, is_last=attempt == settings.attempts, probes=bool(probes))
            notes += [f"weights version {version}, attempt {attempt}: {text}" for text in verdict.problems.values()]
            if verdict.final:
                break
        if not verdict.good:
            raise PublishError(
                f"no inference server has the weights of version {version} after {settings.attempts} attempts:\n"
                + "\n".join(f"  - {note}" for note in notes)
            )
        if self._engine is not None:
            self._engine.use_version(version, verdict.good)
        self._published += 1
        return notes

    def _attempt(self, version: int, *, is_last: bool, probes: bool) -> _Verdict:
        weights, result = self._trainer.export_weights(), SyncResult(version, {})
        if self._sync is not None:
            result = self._sync.send(weights, version)
        else:
            drain(weights)
        result = from_leader(lambda: result, self._trainer.groups.world)
        wrong = self._probe.run(self._sync, list(result.good), version) if probes and result.good else {}
        if wrong and is_last:
            # Servers that sample from other weights, or mean something else, are not to be worked around.
            raise PublishError("\n".join(wrong.values()))
        again = bool(result.failed or wrong or not result.good)
        return _Verdict(
            [url for url in result.good if url not in wrong],
            {**result.absent, **result.failed, **wrong},
            final=not again or (is_last and bool(result.good)),
        )

    def close(self) -> None:
        """Leave the servers as they are."""
        if self._sync is not None:
            self._sync.close()


class Probe:
    """Asks servers for a response, and computes its log-probabilities on the trainer's own shards.

    Args:
        trainer: whose weights the servers should have.
        config: the whole configuration.
        inputs: its prompts make the request.
    """

    def __init__(self, trainer: PolicyTrainer, config: Config, inputs: Inputs) -> None:
        self._trainer, self._config = trainer, config
        rollout, context = config.rollout, inputs.hf_config.max_position_embeddings
        new_tokens = min(32, rollout.max_new_tokens)
        text, tokens = _long_prompt(inputs, min(_PROBE_TOKENS, context - new_tokens))
        coarse = "fp32" if rollout.dtype == config.model.dtype == "fp32" else "bf16"
        self._expected: dict[str, Any] = {
            "prompt": text,
            "prompt_token_ids": tokens,
            "vocab_size": inputs.hf_config.vocab_size,
            "temperature": rollout.temperature,
            "dtype": coarse,
            "topk_logprobs": config.loss.topk if config.loss.is_topk else 0,
            "routing": trainer.routing_shape if config.needs_engine_routing else None,
            "max_new_tokens": new_tokens,
        }

    def run(self, sync: WeightSync | None, urls: Sequence[str], version: int) -> dict[str, str]:
        """Why servers are not what they should be, by URL; empty = all are. A collective; ``sync`` on rank 0."""
        expected, world = Expectation(**self._expected, policy_version=version), self._trainer.groups.world
        wrong: dict[str, str] = {}
        answers: list[ProbeAnswer] = []
        if sync is not None:
            for url, answer in sync.ask(lambda server: ask(server, expected), urls).items():
                if isinstance(answer, ProbeAnswer):
                    answers.append(answer)
                else:
                    wrong[url] = str(answer)
        wrong, answers = from_leader(lambda: (wrong, answers), world)
        if not answers:
            return wrong
        ours = self._recompute(answers, expected, expected.temperature)
        raw = ours if expected.temperature == 1 else self._recompute(answers, expected, 1.0)
        for answer, at_temperature, at_one in zip(answers, ours, raw, strict=True):
            try:
                judge(answer, expected, at_temperature, at_one)
            except ServerError as error:
                wrong[answer.url] = str(error)
        return wrong

    def _recompute(
        self, answers: Sequence[ProbeAnswer], expected: Expectation, temperature: float
    ) -> list[list[float]]:
        """The trainer's log-probabilities of each response; every data-parallel rank computes all of them."""
        samples = [to_training_sample(expected.prompt_token_ids, a.generation.token_ids, None, 0.0) for a in answers]
        packed = self._trainer.pack(samples, self._config.train.micro_batch_tokens)
        rows = self._trainer.logprobs(packed.batches, temperature=temperature)
        result: dict[int, list[float]] = {}
        for part, batch, row in zip(packed.bins, packed.batches, rows, strict=False):  # no rows but on the last stage
            for i, start in zip(part, batch.cu_seqlens.tolist(), strict=False):  # a padding sequence may follow
                result[i] = row[start : start + samples[i].num_tokens][samples[i].loss_mask].tolist()
        every: list[dict[int, list[float]]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(every, result)
        complete = next(found for found in every if len(found) == len(samples))
        return [complete[i] for i in range(len(samples))]


def _long_prompt(inputs: Inputs, most: int) -> tuple[str, tuple[int, ...]]:
    """The first prompts one after the other, up to ``most`` tokens, at least one prompt."""
    text, tokens = "", tuple[int, ...]()
    for i in range(len(inputs.train_prompts)):
        longer = text + inputs.train_prompts[i].text
        encoded = tuple(inputs.tokenizer.encode(longer, add_special_tokens=False))
        if text and len(encoded) > most:
            break
        text, tokens = longer, encoded
        if len(tokens) >= most:
            break
    return text, tokens

"""The policy's weights to the rollout engine, and the proof that they arrived. Every rank takes part."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from megatron_dppo.config.rollout import RolloutConfig
from megatron_dppo.engines.local.engine import LocalEngine
from megatron_dppo.engines.server_engine import ServerEngine
from megatron_dppo.errors import NoUsableServer, PublishError, ServerError
from megatron_dppo.hf.folder import drain
from megatron_dppo.parallel.objects import agreed, from_each, from_leader
from megatron_dppo.rollout.server import InferenceServer, ServerInfo
from megatron_dppo.weights.adapter_proof import AdapterProof
from megatron_dppo.weights.attempt import SyncResult, ask_each, wait_for_one
from megatron_dppo.weights.handles import Sharing
from megatron_dppo.weights.probe import Findings, Probe
from megatron_dppo.weights.sync import WeightSync

if TYPE_CHECKING:
    from megatron_dppo.policy.trainer import PolicyTrainer

_AGAIN_SECONDS = 0.5


async def release_all(servers: Sequence[InferenceServer], attempts: int) -> list[str]:
    """Until every server that answers has released its memory; returns what the user should know.

    One that does not answer has most likely ended, and has no memory then. One that did not say whether it has released
    it is not asked again: its next answer would be the name that the call before was sent under.

    Raises:
        PublishError: a server refuses: training beside it would run out of memory.
        ConfigError: one was started without what this takes.
    """
    left, failed = list(servers), dict[str, ServerError]()
    for attempt in range(attempts):
        if attempt and left:
            await asyncio.sleep(_AGAIN_SECONDS)
        for url, answer in (await ask_each(left, _release)).items():
            failed.pop(url, None)
            if isinstance(answer, ServerError):
                failed[url] = answer
        left = [server for server in left if server.url in failed and failed[server.url].status is not None]
    if refusals := [str(failed[server.url]) for server in left]:
        raise PublishError(
            "the trainer cannot use its GPUs, since servers on them keep their memory (rollout.servers.colocated):\n"
            + "\n".join(f"  - {refusal}" for refusal in refusals)
        )
    return [f"did not release its memory, and training may lack it: {error}" for error in failed.values()]


async def _release(server: InferenceServer) -> None:
    if not await server.alive():  # soon known of one that was silent before
        raise ServerError(server.url, "no answer")
    await server.release_memory()


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


class _Versioned(Protocol):
    policy_version: int


class OwnPublisher:
    """For an engine that samples with the trainer's own model: it only learns the version."""

    def __init__(self, trainer: PolicyTrainer, engine: _Versioned) -> None:
        self._trainer, self._engine = trainer, engine

    def publish(self) -> list[str]:
        """See ``Publisher``."""
        self._engine.policy_version = self._trainer.policy_version
        return []

    def close(self) -> None:
        """Nothing."""


@dataclass(frozen=True)
class _Verdict:
    """What rank 0 tells all ranks of an attempt."""

    good: dict[str, ServerInfo]
    """by URL: those that have the weights, by this attempt or one before"""
    problems: dict[str, str]
    """by URL: the servers that did not get the weights, or do not show them"""
    final: bool
    """whether to go on with these servers"""
    alone: bool
    """whether no server answered at all"""
    unproved: dict[str, str]
    """by URL: what of good servers' weights could not be proved byte by byte"""


def _named(texts: dict[str, str]) -> list[str]:
    """Each with the URL that it belongs to."""
    return [text if url in text else f"{url}: {text}" for url, text in texts.items()]


class ServerPublisher:
    """For inference servers. Rank 0 sends; all ranks gather the weights and compute the probe.

    A server that fails in a sync gets the weights again, ``attempts`` times in all, while those that have them are left
    alone; then the run goes on without it, or, when none is left, stops. One that does not answer at all is left out at
    once. Either gets its chance at the next sync, before it gets any work. When none answers, one that is being started
    again is waited for, ``rollout.servers.patience_seconds`` long.

    Args:
        trainer: the policy.
        engine: this rank's; None on ranks that get their rollouts from another one.
        sync: rank 0's; None on all others.
        rollout: attempts, probes and patience.
        probe: what looks at servers after a sync.
        sharing: of the method ``ipc``, the same on all ranks; None with the other methods.
        adapters: of the method ``adapter``; None with the other methods.
    """

    def __init__(
        self,
        trainer: PolicyTrainer,
        engine: ServerEngine | None,
        sync: WeightSync | None,
        *,
        rollout: RolloutConfig,
        probe: Probe,
        sharing: Sharing | None = None,
        adapters: AdapterProof | None = None,
    ) -> None:
        self._trainer, self._engine, self._sync, self._rollout = trainer, engine, sync, rollout
        self._probe, self._sharing, self._adapters = probe, sharing, adapters
        self._published = 0
        self._told: set[str] = set()

    def publish(self) -> list[str]:
        """See ``Publisher``.

        Raises:
            PublishError: no server could be given the weights, or one of them answers with other weights.
            NoUsableServer: no server answers.
        """
        settings, version = self._rollout.weight_sync, self._trainer.policy_version
        probes = self._published == 0 or (settings.probe_every and self._published % settings.probe_every == 0)
        notes: list[str] = []
        if self._engine is not None:
            self._engine.pause()
        from_each(None, self._trainer.groups.world)  # until no rank has a request under way
        kept, unproved, waited = dict[str, ServerInfo](), dict[str, str](), False
        for attempt in range(1, settings.attempts + 1):
            verdict = self._attempt(version, kept, is_last=attempt == settings.attempts, probes=bool(probes))
            kept = verdict.good
            unproved |= verdict.unproved
            notes += [f"weights version {version}, attempt {attempt}: {text}" for text in _named(verdict.problems)]
            if verdict.final:
                break
            if verdict.alone and not waited:
                waited = True
                self._wait_for_one(verdict.problems)
        if not kept:
            problem = f"no inference server has the weights of version {version} after {settings.attempts} attempts:\n"
            problem += "\n".join(f"  - {note}" for note in notes)
            raise NoUsableServer("rollout.servers", problem) if verdict.alone else PublishError(problem)
        if self._engine is not None:
            self._engine.use_version(version, list(kept))
        self._published += 1
        # Once, not at each sync.
        told, self._told = self._told, self._told | set(_named(unproved))
        return [*notes, *sorted(self._told - told)]

    def release(self) -> list[str]:
        """Until the servers have given up their GPUs' memory; nothing is asked of them before the next ``publish``.

        A collective. Returns what the user should know.

        Raises:
            PublishError: a server refuses.
            ConfigError: one was started without what this takes.
        """
        world, attempts = self._trainer.groups.world, self._rollout.weight_sync.attempts
        if self._engine is not None:
            self._engine.pause()
        from_each(None, world)  # until no rank has a request under way

        def release() -> list[str]:
            return [] if self._sync is None else self._sync.run(lambda servers: release_all(servers, attempts))

        return agreed(release, world)

    def _wait_for_one(self, urls: Iterable[str]) -> None:
        """Until one of the servers answers, as long as the patience lasts; rank 0 asks, the others wait."""
        patience = self._rollout.servers.patience_seconds

        def ask() -> None:
            assert self._sync is not None
            self._sync.run(lambda servers: wait_for_one(servers, patience), urls)

        from_leader(ask, self._trainer.groups.world)

    def _attempt(self, version: int, kept: Mapping[str, ServerInfo], *, is_last: bool, probes: bool) -> _Verdict:
        export = self._trainer.export_weights if self._adapters is None else self._trainer.export_adapters
        weights, result = export(), SyncResult(version, {})
        if self._sync is not None:
            result = self._sync.send(weights, version, kept)
        elif self._sharing is not None:
            self._sharing.open(weights).run()
        else:
            drain(weights)
        result = from_leader(lambda: result, self._trainer.groups.world)
        fresh = [url for url in result.good if url not in kept]
        found = Findings({}, {})
        if self._adapters is not None:
            result, found = self._adapters.run(result, fresh)
            fresh = [url for url in fresh if url in result.good]
        if probes and fresh:
            found = self._probe.run(self._sync, fresh, version).joined(found)
        wrong, lost = found.wrong, found.wrong | found.silent
        if wrong and is_last:
            # Servers that sample from other weights, or mean something else, are not to be worked around.
            raise PublishError("\n".join(wrong.values()))
        again = bool(result.failed or lost or not result.good)
        good = {url: info for url, info in result.good.items() if url not in lost}
        return _Verdict(
            good,
            {**result.absent, **result.failed, **lost},
            final=not again or (is_last and bool(good)),
            alone=not (result.good or result.failed),
            unproved=result.notes,
        )

    def close(self) -> None:
        """Leave the servers as they are."""
        if self._sync is not None:
            self._sync.close()

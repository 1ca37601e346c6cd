"""Publication of the policy's weights to the rollout engine, with the proof that they arrived. A collective."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from megatron_dppo.config.rollout import RolloutConfig
from megatron_dppo.errors import NoUsableServer, PublishError, ServerError
from megatron_dppo.hf.folder import drain
from megatron_dppo.parallel.objects import all_gather_objects, broadcast_object, run_on_leader
from megatron_dppo.weights.adapter_proof import AdapterProof
from megatron_dppo.weights.attempt import SyncResult, call_all, wait_for_any
from megatron_dppo.weights.ipc import MemorySharing
from megatron_dppo.weights.probe import Probe, ProbeFindings
from megatron_dppo.weights.sync import WeightSync
from megatron_dppo_engines.server import InferenceServer, ServerInfo

if TYPE_CHECKING:
    from megatron_dppo.engines.local.engine import LocalEngine
    from megatron_dppo.engines.server_engine import ServerEngine
    from megatron_dppo.policy.trainer import PolicyTrainer

_RETRY_SECONDS = 0.5
"""Pause between two attempts to have a server release its memory."""


async def release_all(servers: Sequence[InferenceServer], attempts: int) -> list[str]:
    """Have every server that responds release its memory; return notes about those that may still hold some.

    A server that does not respond has most likely exited, and its memory is free. It is not called again: a second call
    would find the version name that the first one has set, and report success in any case. A PublishError if a server
    refuses: training beside it would run out of memory.
    """
    pending = list(servers)
    failed = dict[str, ServerError]()
    for attempt in range(attempts):
        if attempt and pending:
            await asyncio.sleep(_RETRY_SECONDS)
        for url, result in (await call_all(pending, _release)).items():
            failed.pop(url, None)
            if isinstance(result, ServerError):
                failed[url] = result
        # Without an HTTP status the server did not respond.
        pending = [server for server in pending if server.url in failed and failed[server.url].status is not None]
    if refusals := [str(failed[server.url]) for server in pending]:
        raise PublishError(
            "the trainer cannot use its GPUs, since servers on them keep their memory (rollout.servers.colocated):\n"
            + "\n".join(f"  - {refusal}" for refusal in refusals)
        )
    return [f"did not release its memory, and training may lack it: {error}" for error in failed.values()]


async def _release(server: InferenceServer) -> None:
    # ``alive`` fails sooner than ``release_memory`` if the server is gone.
    if not await server.alive():
        raise ServerError(server.url, "no response")
    await server.release_memory()


class Publisher:
    """Publisher of the policy's current weights to the engine that samples, here to one without servers."""

    probed: Mapping[str, float] = {}
    """Mean |p - q| of each server's last probe, by URL, on every rank; empty without servers."""

    def publish(self) -> list[str]:
        """Publish the current version to the engine and return notes for the user. A collective."""
        raise NotImplementedError

    def exclude(self, servers: Mapping[str, str]) -> None:
        """Use servers no more in this run, on every rank. ``servers`` has the reason by URL."""

    def close(self) -> None:
        """Free all resources."""


class LocalPublisher(Publisher):
    """Publisher for an engine in this process; the engine is None on ranks that have none."""

    def __init__(self, trainer: PolicyTrainer, engine: LocalEngine | None) -> None:
        self._trainer = trainer
        self._engine = engine

    def publish(self) -> list[str]:
        """See ``Publisher``."""
        weights = self._trainer.export_weights()
        if self._engine is not None:
            self._engine.update_weights(weights, self._trainer.policy_version)
        else:
            drain(weights)
        return []


class _VersionedEngine(Protocol):
    policy_version: int


class BatchInvariantPublisher(Publisher):
    """Publisher for an engine that samples with the trainer's own model: only the version is passed on."""

    def __init__(self, trainer: PolicyTrainer, engine: _VersionedEngine) -> None:
        self._trainer = trainer
        self._engine = engine

    def publish(self) -> list[str]:
        """See ``Publisher``."""
        self._engine.policy_version = self._trainer.policy_version
        return []


@dataclass(frozen=True)
class _AttemptOutcome:
    """Outcome of an attempt, the same on all ranks."""

    synced: dict[str, ServerInfo]
    """Servers that have the weights, from this attempt or an earlier one, by URL."""
    problems: dict[str, str]
    """Reasons of the servers that did not get the weights or failed the probe, by URL."""
    is_final: bool
    """The run continues with the synced servers."""
    none_responded: bool
    unproved: dict[str, str]
    """Parts of synced servers' weights that could not be proved byte by byte, by URL."""


def _with_urls(texts: dict[str, str]) -> list[str]:
    """Return the texts, each with its URL."""
    return [text if url in text else f"{url}: {text}" for url, text in texts.items()]


class ServerPublisher(Publisher):
    """Publisher for inference servers. Rank 0 sends; all ranks gather the weights and compute the probe.

    A server that fails in a sync gets the weights again, up to ``attempts`` times, while the synced servers are left
    alone. Then the run continues without it, or stops if no server is left. A server that does not respond at all is
    left out at once. Both are tried again in the next sync, before they get any requests. A server whose probe is wrong
    in the last attempt is not used again in this run. If no server responds, rank 0 waits up to
    ``rollout.servers.unavailable_timeout_seconds`` for one that is being restarted.

    ``engine`` is None on ranks that receive their rollouts from another one, ``sync`` on all but rank 0. ``sharing``
    belongs to the method ``ipc``, ``adapters`` to the method ``adapter``.
    """

    def __init__(
        self,
        trainer: PolicyTrainer,
        engine: ServerEngine | None,
        sync: WeightSync | None,
        *,
        rollout: RolloutConfig,
        probe: Probe,
        sharing: MemorySharing | None = None,
        adapters: AdapterProof | None = None,
    ) -> None:
        self._trainer = trainer
        self._engine = engine
        self._sync = sync
        self.rollout = rollout
        self._probe = probe
        self._sharing = sharing
        self._adapters = adapters
        self._num_published = 0
        self.probed: dict[str, float] = {}
        """See ``Publisher``."""
        self._reported: set[str] = set()
        """Notes about unproved weights that the user has seen."""

    def publish(self) -> list[str]:
        """See ``Publisher``. NoUsableServer: none responds. PublishError: none got the weights or samples from them."""
        settings = self.rollout.weight_sync
        version = self._trainer.policy_version
        is_first = self._num_published == 0
        runs_probe = is_first or bool(settings.probe_every and self._num_published % settings.probe_every == 0)
        notes: list[str] = []

        self._pause()
        synced = dict[str, ServerInfo]()
        unproved = dict[str, str]()
        has_waited = False
        for attempt in range(1, settings.attempts + 1):
            outcome = self._attempt(version, synced, is_last=attempt == settings.attempts, runs_probe=runs_probe)
            synced = outcome.synced
            unproved |= outcome.unproved
            notes += [f"weights version {version}, attempt {attempt}: {text}" for text in _with_urls(outcome.problems)]
            if outcome.is_final:
                break
            if outcome.none_responded and not has_waited:
                has_waited = True
                self._wait_for_any(outcome.problems)
        if not synced:
            problem = f"no inference server has the weights of version {version} after {settings.attempts} attempts:\n"
            problem += "\n".join(f"  - {note}" for note in notes)
            raise NoUsableServer("rollout.servers", problem) if outcome.none_responded else PublishError(problem)

        if self._engine is not None:
            self._engine.use_version(version, list(synced))
        self._num_published += 1
        # Report each note about unproved weights once, not at every sync.
        reported_before = self._reported
        self._reported = reported_before | set(_with_urls(unproved))
        return [*notes, *sorted(self._reported - reported_before)]

    def release(self) -> list[str]:
        """Have the servers release their GPU memory until the next ``publish``; return notes. A collective."""
        attempts = self.rollout.weight_sync.attempts
        self._pause()

        def release() -> list[str]:
            return [] if self._sync is None else self._sync.run(lambda servers: release_all(servers, attempts))

        return run_on_leader(release, self._trainer.groups.world)

    def _pause(self) -> None:
        if self._engine is not None:
            self._engine.pause()
        all_gather_objects(None, self._trainer.groups.world)  # a barrier: no rank has a request in flight afterwards

    def exclude(self, servers: Mapping[str, str]) -> None:
        """See ``Publisher``."""
        if self._engine is not None:
            self._engine.exclude(servers)
        if self._sync is not None:
            self._sync.exclude(servers)

    def _wait_for_any(self, urls: Iterable[str]) -> None:
        """Wait on all ranks until one of the servers responds to rank 0, or until the patience ends."""
        patience = self.rollout.servers.unavailable_timeout_seconds

        def wait() -> None:
            assert self._sync is not None
            self._sync.run(lambda servers: wait_for_any(servers, patience), urls)

        broadcast_object(wait, self._trainer.groups.world)

    def _attempt(
        self, version: int, synced: Mapping[str, ServerInfo], *, is_last: bool, runs_probe: bool
    ) -> _AttemptOutcome:
        """Send the weights to the servers that lack them, and probe those that got them."""
        # All ranks run the export, since it is a collective; rank 0 sends.
        export = self._trainer.export_weights if self._adapters is None else self._trainer.export_adapters
        weights = export()
        result = SyncResult(version, {})
        if self._sync is not None:
            result = self._sync.send(weights, version, synced)
        elif self._sharing is not None:
            self._sharing.open(weights).run()
        else:
            drain(weights)
        # Rank 0 alone knows who got the weights. The proofs below are collectives, so all ranks must agree on it.
        result = broadcast_object(lambda: result, self._trainer.groups.world)

        new_urls = [url for url in result.good if url not in synced]
        findings = ProbeFindings({}, {})
        if self._adapters is not None:
            result, findings = self._adapters.run(result, new_urls)
            new_urls = [url for url in new_urls if url in result.good]
        if runs_probe and new_urls:
            findings = self._probe.run(self._sync, new_urls, version).merged(findings)
            self.probed |= dict(findings.differences)
        failed_probe = findings.wrong | findings.silent
        good = {url: info for url, info in result.good.items() if url not in failed_probe}
        if findings.wrong and is_last:
            # A server that samples from other weights, or means something else by its response: its answers must not
            # be trained on, also not after a later sync without a probe.
            self.exclude(findings.wrong)

        # Absent servers are no reason to retry: they are left out at once, and tried again in the next sync.
        needs_retry = bool(result.failed or failed_probe or not result.good)
        return _AttemptOutcome(
            good,
            {**result.absent, **result.failed, **failed_probe},
            is_final=not needs_retry or (is_last and bool(good)),
            none_responded=not (result.good or result.failed),
            unproved=result.notes,
        )

    def close(self) -> None:
        """Close the connections; the servers keep running."""
        if self._sync is not None:
            self._sync.close()

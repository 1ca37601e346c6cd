"""Proof that servers add the run's adapters to the base model, each to its weight. A collective of all ranks.

At the start of a run B is zero. A server that omits adapters (other names, targets that it was not started with, an
unknown layout of experts) then responds like one that adds them. Each server is therefore probed once with random
adapters, which change the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from megatron_dppo.hf.folder import WeightStream, drain
from megatron_dppo.parallel.objects import broadcast_object
from megatron_dppo.weights.attempt import SyncResult
from megatron_dppo.weights.probe import Probe, ProbeFindings
from megatron_dppo.weights.sync import WeightSync

if TYPE_CHECKING:
    from megatron_dppo.policy.trainer import PolicyTrainer

_LEFT_OUT = (
    "does not add the adapters as the trainer does (asked with random ones; an engine may leave out targets or experts "
    "whose names or layout it does not know): "
)
_OTHER_BASE = "it cannot be shown that it was started with the base model of model.path: "
_UNKNOWN = -1
"""Version of a server that no sync has updated: it is new or restarted."""


class AdapterProof:
    """Proof for each server, repeated after its restart; ``proves_base`` also compares digests of the base model."""

    def __init__(self, trainer: PolicyTrainer, sync: WeightSync | None, probe: Probe, *, proves_base: bool) -> None:
        self._trainer = trainer
        self._sync = sync
        self._probe = probe
        self._proves_base = proves_base
        self._proved: set[str] = set()

    def run(self, result: SyncResult, new_urls: Sequence[str]) -> tuple[SyncResult, ProbeFindings]:
        """Prove the servers that got the adapters in an attempt (``new_urls``) and are not proved yet.

        Returns the result without the servers that failed since, and the findings of the probe. All other servers have
        the policy's own adapters.
        """
        self._proved -= {url for url in new_urls if result.good[url].policy_version == _UNKNOWN}
        unproved = [url for url in new_urls if url not in self._proved]
        if not unproved:
            return result, ProbeFindings({}, {})
        lora = self._trainer.lora
        assert lora is not None
        if self._proves_base:
            result = _without_failed(result, self._prove_base(unproved))
        # Random adapters: send, probe, then send the policy's own again.
        with lora.randomized():
            result = _without_failed(result, self._send(result, unproved))
            remaining = [url for url in unproved if url in result.good]
            findings = self._probe.run(self._sync, remaining, result.version) if remaining else ProbeFindings({}, {})
        result = _without_failed(result, self._send(result, unproved))
        findings = ProbeFindings({url: _LEFT_OUT + text for url, text in findings.wrong.items()}, findings.silent)
        good = {url for url in unproved if url in result.good}
        self._proved |= good - findings.wrong.keys() - findings.silent.keys()
        return result, findings

    def _prove_base(self, urls: Sequence[str]) -> SyncResult:
        # With an overlapped gather, Megatron completes the parameters only for the next forward pass. The export
        # would read old ones.
        self._trainer.optimizer.finish_overlapped_gather()
        base = self._trainer.bridge.export(Tensor.detach)
        result = self._run_on_leader(base, lambda sync: sync.prove_base(base, urls))
        return replace(result, failed={url: _OTHER_BASE + text for url, text in result.failed.items()})

    def _send(self, result: SyncResult, urls: Sequence[str]) -> SyncResult:
        synced = {url: info for url, info in result.good.items() if url not in urls}
        adapters = self._trainer.export_adapters()
        return self._run_on_leader(adapters, lambda sync: sync.send(adapters, result.version, synced))

    def _run_on_leader(self, stream: WeightStream, work: Callable[[WeightSync], SyncResult]) -> SyncResult:
        """Run work on rank 0 and return its result on all ranks, which all consume the stream."""
        result = SyncResult(_UNKNOWN, {})
        if self._sync is None:
            drain(stream)
        else:
            result = work(self._sync)
        return broadcast_object(lambda: result, self._trainer.groups.world)


def _without_failed(result: SyncResult, later: SyncResult) -> SyncResult:
    """Return a result without the servers that failed in a later one."""
    failed = {**later.failed, **later.absent}
    good = {url: info for url, info in result.good.items() if url not in failed}
    return replace(result, good=good, failed=result.failed | failed, notes=result.notes | later.notes)

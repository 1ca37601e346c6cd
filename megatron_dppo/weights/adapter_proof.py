"""That servers add the run's adapters to the base model, each to the weight that it belongs to. Every rank takes part.

At the start of a run B is zero, so that a server which leaves adapters out (names that do not fit, targets that it was
not started with, an expert's layout that it does not know) answers as one that adds them. Each server is therefore
asked once with random ones, which change the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from megatron_dppo.hf.folder import WeightStream, drain
from megatron_dppo.parallel.objects import from_leader
from megatron_dppo.weights.attempt import SyncResult
from megatron_dppo.weights.probe import Findings, Probe
from megatron_dppo.weights.sync import WeightSync

if TYPE_CHECKING:
    from megatron_dppo.policy.trainer import PolicyTrainer

_LEFT_OUT = (
    "does not add the adapters as the trainer does (asked with random ones; an engine may leave out targets or experts "
    "whose names or layout it does not know): "
)
_OTHER_BASE = "it cannot be shown that it was started with the base model of model.path: "
_UNKNOWN = -1
"""The version of a server that has none of ours: it is new, or was started again."""


class AdapterProof:
    """Once for each server, and again for one that was started again.

    Args:
        trainer: with adapters.
        sync: rank 0's; None on all others.
        probe: what looks at servers after a sync.
        proves_base: compare checksums of the base model too.
    """

    def __init__(self, trainer: PolicyTrainer, sync: WeightSync | None, probe: Probe, *, proves_base: bool) -> None:
        self._trainer, self._sync, self._probe = trainer, sync, probe
        self._proves_base = proves_base
        self._proved: set[str] = set()

    def run(self, sent: SyncResult, fresh: Sequence[str]) -> tuple[SyncResult, Findings]:
        """After an attempt.

        Args:
            sent: of the attempt, the same on all ranks.
            fresh: URLs of the servers that got the adapters in it.

        Returns:
            The result without those that failed since, and what is wrong with servers. The others have the policy's own
            adapters.
        """
        self._proved -= {url for url in fresh if sent.good[url].policy_version == _UNKNOWN}
        unproved = [url for url in fresh if url not in self._proved]
        if not unproved:
            return sent, Findings({}, {})
        lora = self._trainer.lora
        assert lora is not None
        if self._proves_base:
            sent = _without(sent, self._prove_base(unproved))
        with lora.randomized():
            sent = _without(sent, self._send(sent, unproved))
            left = [url for url in unproved if url in sent.good]
            found = self._probe.run(self._sync, left, sent.version) if left else Findings({}, {})
        sent = _without(sent, self._send(sent, unproved))
        found = Findings({url: _LEFT_OUT + text for url, text in found.wrong.items()}, found.silent)
        self._proved |= {url for url in unproved if url in sent.good} - found.wrong.keys() - found.silent.keys()
        return sent, found

    def _prove_base(self, urls: Sequence[str]) -> SyncResult:
        self._trainer.optimizer.finish_overlapped_gather()
        base = self._trainer.bridge.export(Tensor.detach)
        found = self._on_leader(base, lambda sync: sync.prove_base(base, urls))
        return replace(found, failed={url: _OTHER_BASE + text for url, text in found.failed.items()})

    def _send(self, sent: SyncResult, urls: Sequence[str]) -> SyncResult:
        others = {url: info for url, info in sent.good.items() if url not in urls}
        adapters = self._trainer.export_adapters()
        return self._on_leader(adapters, lambda sync: sync.send(adapters, sent.version, others))

    def _on_leader(self, stream: WeightStream, work: Callable[[WeightSync], SyncResult]) -> SyncResult:
        """What rank 0 finds, on all ranks; they all run the stream."""
        found = SyncResult(_UNKNOWN, {})
        if self._sync is None:
            drain(stream)
        else:
            found = work(self._sync)
        return from_leader(lambda: found, self._trainer.groups.world)


def _without(sent: SyncResult, later: SyncResult) -> SyncResult:
    """What is left after another look at some of the servers."""
    failed = {**later.failed, **later.absent}
    good = {url: info for url, info in sent.good.items() if url not in failed}
    return replace(sent, good=good, failed=sent.failed | failed, notes=sent.notes | later.notes)

"""Only what changed since the version before, for the servers that have exactly that one.

Who that is, is known: a server whose own process says the version, and whose digests after it was sent were those of
the bytes that were sent, tensor by tensor, in this life of the trainer. Everybody else gets all weights, and so does
everybody in another attempt at one version. After each sync the digests are compared with those of all new weights: a
patch on other bytes than we believe is found like any wrong tensor.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from torch import Tensor

from megatron_dppo.rollout.attempt import Attempt
from megatron_dppo.rollout.server import InferenceServer
from megatron_dppo.serving.sglang_extension.megatron_dppo_delta import Patch, packed, patch_of
from megatron_dppo.weights.proof import SyncProof
from megatron_dppo.weights.transfer import Tensors, Weights


class Deltas:
    """The bytes that were sent last, on the host: one copy of the model in the type that it is sent in."""

    def __init__(self) -> None:
        self._sent: dict[str, Tensor] = {}
        self._version: int | None = None
        """of all that was sent last; None = a stream broke off, or nothing was sent yet"""
        self._exact: dict[str, int] = {}
        """by URL: the version that a server holds byte by byte"""
        self._patched = frozenset[str]()
        self._patches: dict[str, Patch | None] = {}
        """of tensors that are in no bucket yet; None = it goes whole"""

    def choose(self, servers: list[InferenceServer], attempt: Attempt, *, again: bool) -> None:
        """Before anything is sent: who gets patches.

        Args:
            servers: that get the weights.
            attempt: what they say of themselves.
            again: another attempt at the same weights.
        """
        exact = {server.url: self._exact.pop(server.url, None) for server in servers}
        held = {url for url, version in exact.items() if version == attempt.infos[url].policy_version == self._version}
        self._patched = frozenset() if again else frozenset(held)

    def watch(self, weights: Weights, version: int) -> Weights:
        """The same stream on the host, compared with the one before and kept in its place."""
        self._version, self._patches = None, {}
        for name, tensor in weights:
            new, old = tensor.cpu().contiguous(), self._sent.get(name)
            if self._patched:
                self._patches[name] = None if old is None else patch_of(name, old, new)
            self._sent[name] = new
            yield name, new
        self._version = version

    def giving(self, tensors: Tensors) -> Callable[[InferenceServer], Awaitable[None]]:
        """The call that gives a server a bucket, whole or as what changed."""
        found = [(name, tensor, self._patches.pop(name, None)) for name, tensor in tensors]
        patches = [patch for _, _, patch in found if patch is not None and len(patch.gaps)]
        changes = [(name, tensor) for name, tensor, patch in found if patch is None]
        changes += packed(patches) if patches else []

        async def give(server: InferenceServer) -> None:
            if server.url not in self._patched:
                await server.receive_tensors(tensors)
            elif changes:
                await server.receive_patches(changes)

        return give

    def judged(self, proof: SyncProof, servers: list[InferenceServer], attempt: Attempt) -> None:
        """Note in ``attempt`` whose patches are not proved, and who will get none.

        Args:
            proof: after it judged.
            servers: that may still be good.
            attempt: one attempt.
        """
        for url in (server.url for server in servers):
            if url in proof.exact:
                self._exact[url] = attempt.version
            elif url in self._patched:
                attempt.failed[url] = "got only what changed, and its checksums do not prove all of its weights"
            else:
                attempt.notes[url] = "; ".join(
                    part
                    for part in (
                        attempt.notes.get(url),
                        "gets all weights at each sync, in spite of rollout.weight_sync.delta: its checksums do not "
                        "prove them all byte by byte",
                    )
                    if part
                )

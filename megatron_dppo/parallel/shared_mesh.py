"""Process groups over the CPU that share the connections of one gloo group.

gloo connects every pair of ranks of a group when the group is created. A rank of a run with 1,024 ranks would have a
connection to every other rank for each group that it is in. Here only the group of all ranks has connections. The other
groups send their messages through it, point to point, with a tag of their own.
"""

# torch's stubs describe the methods that users call. torch's functions call them with options, as here.
# mypy: disable-error-code="override"

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

BACKEND = "shared_mesh"


class MessageTag(IntEnum):
    """Tag of a group's messages. Two ranks must not be together in two groups with the same tag.

    0 is the default of ``dist.send`` in the group of all ranks. gloo numbers its own collectives apart from tags.
    """

    DATA_PARALLEL = 1
    REPLICA = 2
    BACKGROUND = 3


class _Options(NamedTuple):
    world: ProcessGroup
    tag: MessageTag


def new_shared_mesh_group(ranks: Sequence[int], world: ProcessGroup, tag: MessageTag) -> ProcessGroup:
    """Create a group that uses the connections of ``world``; all ranks must call it in the same order.

    It has the timeout of ``world``. Another thread may use it than ``world`` and groups with other tags. Returns
    torch's ``NON_GROUP_MEMBER`` on a rank that is not in ``ranks``.
    """
    return dist.new_group(list(ranks), backend=BACKEND, pg_options=_Options(world, tag))


class SharedMeshGroup(ProcessGroup):
    """Collectives of CPU tensors, made of messages between two ranks.

    torch calls these methods with lists of one tensor. They return None when they are complete. Ranks are those in the
    group. Tensors must be contiguous; empty ones are not sent.
    """

    def __init__(self, rank: int, ranks: Sequence[int], world: ProcessGroup, tag: MessageTag) -> None:
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]
        self._ranks = list(ranks)
        self._world = world
        self._tag = tag

    def getBackendName(self) -> str:
        """Return the name of the backend; the method's name is torch's."""
        return BACKEND

    def send(self, tensors: list[Tensor], dstRank: int, tag: int = 0) -> Work:
        """Start to send a tensor to a rank."""
        self._check_tag(tag)
        return self._world.send(tensors, self._ranks[dstRank], self._tag)

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int = 0) -> Work:
        """Start to receive a tensor from a rank."""
        self._check_tag(tag)
        return self._world.recv(tensors, self._ranks[srcRank], self._tag)

    def broadcast(self, tensors: list[Tensor], opts: dist.BroadcastOptions) -> None:
        """Send the tensor of ``opts.rootRank`` to all ranks, along a binomial tree."""
        size = self.size()
        distance = (self.rank() - opts.rootRank) % size
        # A rank receives from the one whose distance lacks its own lowest bit, and serves those below that bit.
        bit = 1
        while bit < size and not distance & bit:
            bit <<= 1
        if distance:
            _wait(self._receive(tensors[0], (self.rank() - bit) % size))
        targets = []
        while bit > 1:
            bit >>= 1
            if distance + bit < size:
                targets.append((self.rank() + bit) % size)
        _wait(work for target in targets for work in self._send(tensors[0], target))

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: dist.GatherOptions) -> None:
        """Receive the tensors of all ranks on ``opts.rootRank``."""
        if self.rank() == opts.rootRank:
            self._exchange({}, dict(enumerate(outputs[0])), inputs[0])
        else:
            self._exchange({opts.rootRank: inputs[0]}, {}, inputs[0])

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: dist.ScatterOptions) -> None:
        """Send a tensor to each rank from ``opts.rootRank``."""
        if self.rank() == opts.rootRank:
            self._exchange(dict(enumerate(inputs[0])), {self.rank(): outputs[0]}, inputs[0][self.rank()])
        else:
            self._exchange({}, {opts.rootRank: outputs[0]}, outputs[0])

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: object = None) -> None:
        """Send the tensors of all ranks to all ranks: first to rank 0, then down a tree."""
        del opts
        root = dist.GatherOptions()
        root.rootRank = 0
        together = inputs[0].new_empty(self.size(), *inputs[0].shape)
        self.gather([list(together.unbind())], inputs, root)
        self.broadcast([together], dist.BroadcastOptions())
        for output, value in zip(outputs[0], together.unbind(), strict=True):
            output.copy_(value)

    def allreduce(self, tensors: list[Tensor], opts: Any) -> None:
        """Add up a tensor over all ranks, in the order of the ranks."""
        if opts.reduceOp != dist.ReduceOp.SUM:
            raise NotImplementedError(
                f"{BACKEND} only adds, got {opts.reduceOp}. Fix: reduce in the group of all ranks"
            )
        parts = [torch.empty_like(tensors[0]) for _ in range(self.size())]
        self.allgather([parts], tensors)
        tensors[0].copy_(torch.stack(parts).sum(0))

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: object = None,
    ) -> None:
        """Send each rank its part of ``input``, which is split along its first dimension; empty sizes: equal parts."""
        del opts
        outgoing = input.split(input_split_sizes or len(input) // self.size())
        incoming = output.split(output_split_sizes or len(output) // self.size())
        self._exchange(dict(enumerate(outgoing)), dict(enumerate(incoming)), outgoing[self.rank()])

    def barrier(self, opts: object = None) -> None:
        """Wait for all ranks."""
        del opts
        self.allgather([list(torch.empty(self.size(), 1).unbind())], [torch.zeros(1)])

    def _exchange(self, outgoing: dict[int, Tensor], incoming: dict[int, Tensor], local: Tensor) -> None:
        """Send and receive by rank at once, so that no rank waits for another's order; copy ``local`` to itself."""
        if self.rank() in incoming:
            incoming[self.rank()].copy_(local)
        received = [
            work for rank, tensor in incoming.items() if rank != self.rank() for work in self._receive(tensor, rank)
        ]
        sent = [work for rank, tensor in outgoing.items() if rank != self.rank() for work in self._send(tensor, rank)]
        _wait([*received, *sent])

    def _send(self, tensor: Tensor, rank: int) -> list[Work]:
        return [self.send([tensor], rank)] if tensor.numel() else []

    def _receive(self, tensor: Tensor, rank: int) -> list[Work]:
        return [self.recv([tensor], rank)] if tensor.numel() else []

    def _check_tag(self, tag: int) -> None:
        if tag:
            raise NotImplementedError(f"{BACKEND} has one tag for each group, got tag {tag}. Fix: leave the tag out")


def _wait(works: Iterable[Work]) -> None:
    # All are started before the first wait.
    for work in list(works):
        work.wait()


def _refuse(name: str) -> Callable[..., None]:
    def method(self: SharedMeshGroup, *args: object, **kwargs: object) -> None:
        del self, args, kwargs
        raise NotImplementedError(f"{BACKEND} has no {name}. Fix: use another collective, or the group of all ranks")

    return method


# Without these, torch would call the methods of a group without any backend, and crash.
for _name in (
    *("all_gather_single", "all_gather_single_coalesced", "allgather_coalesced", "allreduce_coalesced", "alltoall"),
    *("monitored_barrier", "recv_anysource", "reduce", "reduce_scatter", "reduce_scatter_single"),
    "reduce_scatter_single_coalesced",
):
    setattr(SharedMeshGroup, _name, _refuse(_name))


def _create(options: Any, shared: _Options) -> SharedMeshGroup:
    return SharedMeshGroup(options.group_rank, options.global_ranks_in_group, shared.world, shared.tag)


dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])

"""Other settings of a run, rehearsed and compared: which of them fit, and which are fast."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_dppo.commands.plan.arithmetic import buffers, gradient_bytes, optimizer_bytes_on_device
from megatron_dppo.commands.plan.machine import GpuNode
from megatron_dppo.commands.plan.plan import TIGHT, Model, Plan, make_plan
from megatron_dppo.commands.plan.rehearsals import Rehearsals
from megatron_dppo.commands.plan.rehearse import roles
from megatron_dppo.config.layout import Layout, resolve_layout
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import ConfigError, PlanError, UserError
from megatron_dppo.parallel.platform import DTYPES

Flags = tuple[str, ...]
Load = Callable[[Sequence[str]], Config]
"""Flags to the configuration that they make of the file."""

RECOMPUTE: Mapping[str, Flags] = {
    "full": ("--recompute-granularity=full", "--recompute-method=uniform", "--recompute-num-layers=1"),
    "selective": (
        "--recompute-granularity=selective",
        '--recompute-modules=["moe"]',
        "--recompute-method=null",
        "--recompute-num-layers=null",
    ),
    "none": ("--recompute-granularity=null", "--recompute-method=null", "--recompute-num-layers=null"),
}
"""What ``recompute`` stands for in a search."""

OFFLOAD: Mapping[str, Flags] = {
    "optimizer": ("--optimizer-cpu-offload", "--use-precision-aware-optimizer"),
    "none": ("--no-optimizer-cpu-offload", "--no-use-precision-aware-optimizer"),
}
"""What ``offload`` stands for."""

_GROUPS = {"recompute": RECOMPUTE, "offload": OFFLOAD}

_SIZES = ("1", "2", "4", "8", "16", "32", "64")
AXES: Mapping[str, Sequence[str]] = {
    "tensor-model-parallel-size": _SIZES[:4],
    "pipeline-model-parallel-size": _SIZES[:5],
    "context-parallel-size": _SIZES[:4],
    "expert-model-parallel-size": _SIZES,
    "recompute": tuple(RECOMPUTE),
}
"""What a search tries when it is not told; the nearest settings that fit may offload, too."""


@dataclass(frozen=True)
class Candidate:
    """Settings whose layout divides as it should."""

    flags: Flags
    """beyond the configuration as it is"""
    plan: Plan | None
    reason: str = ""
    """why there is no plan"""

    @property
    def order(self) -> tuple[bool, bool, bool, float]:
        """What fits with room to spare, what fits, what does not, what cannot run; each the fastest first."""
        if self.plan is None:
            return True, True, True, 0.0
        return False, self.plan.room < 0, self.plan.is_tight, self.plan.step_seconds


def axes_of(texts: Sequence[str]) -> Mapping[str, Sequence[str]]:
    """Values by key of ``KEY=VALUE,VALUE`` each; all of ``AXES`` for no text.

    Raises:
        PlanError: a text of another form.

    Example:
        >>> axes_of(["--train.micro_batch_tokens=8192,16384"])
        {'train.micro_batch_tokens': ['8192', '16384']}
    """
    found = {}
    for text in texts:
        name, equals, values = text.removeprefix("--").partition("=")
        if not name or not equals or not values:
            raise PlanError(f"--search {text}: expected KEY=VALUE,VALUE such as tensor-model-parallel-size=1,2")
        found[name.replace("_", "-") if "." not in name else name] = values.split(",")
        if name in _GROUPS and (unknown := set(found[name]) - set(_GROUPS[name])):
            raise PlanError(f"--search {text}: {unknown.pop()!r} is none of {', '.join(_GROUPS[name])}")
    return found or AXES


class Search:
    """Plans of other settings.

    Args:
        load: makes the configuration of flags.
        world_size: trainer processes.
        machine: what they run on.
        rehearsals: who rehearses.
    """

    def __init__(self, load: Load, world_size: int, machine: GpuNode, rehearsals: Rehearsals) -> None:
        self._load, self._world_size, self._machine, self._rehearsals = load, world_size, machine, rehearsals
        self._as_it_is = load(())
        self._model = Model.of(self._as_it_is)

    def all(self, axes: Mapping[str, Sequence[str]], told: Callable[[int, int], None]) -> list[Candidate]:
        """Every combination whose layout can run and whose static part fits, in ``Candidate.order``.

        Args:
            axes: values by key; see ``axes_of``.
            told: is called with the number of combinations that are rehearsed, and of those that were so far.

        Raises:
            PlanError: there is none.
        """
        possible = self._possible(axes, self._machine.memory)
        found: list[Candidate] = []
        for flags in possible:
            told(len(possible), len(found))
            found.append(self._candidate(flags))
        return sorted(found, key=lambda one: one.order)

    def nearest(self, count: int) -> Iterator[Candidate]:
        """Up to ``count`` that fit with room to spare, those that change the fewest settings first.

        Raises:
            PlanError: no combination has room for what it keeps.
        """
        possible = sorted(
            self._possible({**AXES, "offload": tuple(OFFLOAD)}, round((1 - TIGHT) * self._machine.memory)), key=len
        )
        fitting = (one for one in map(self._candidate, possible) if not any(one.order[:3]))
        return itertools.islice(fitting, count)

    def _candidate(self, flags: Flags) -> Candidate:
        config, world_size = self._load(flags), self._world_size
        layout = resolve_layout(config.parallel, config.batch, world_size, self._model.shape)
        kinds = roles(layout, self._model.shape.num_experts is not None)
        # The rank with busy experts needs all that the others of its stage need; stages in the middle need less.
        needed = [kind for kind in kinds if kind == "last" or ("hot" in kinds) == (kind == "hot")]
        try:
            plan = make_plan(
                config, world_size, self._machine, self._rehearsals, model=self._model, kinds=needed, few_layers=True
            )
        except UserError as error:
            return Candidate(flags, None, str(error))
        return Candidate(flags, plan)

    def _possible(self, axes: Mapping[str, Sequence[str]], memory: int) -> list[Flags]:
        """Flags of the combinations whose layout can run in so many bytes, without flags that change nothing.

        Raises:
            PlanError: there is none, with what is against the last one.
        """
        found: dict[str, Flags] = {}
        refused = f"weights, gradients and optimizer alone do not fit {self._machine.name}"
        for values in itertools.product(*axes.values()):
            flags = tuple(itertools.chain.from_iterable(map(_flags, axes, values)))
            try:
                config = self._load(flags)
                layout = resolve_layout(config.parallel, config.batch, self._world_size, self._model.shape)
            except ConfigError as error:
                refused = str(error)
                continue
            if least_bytes(config, self._model, layout) + self._machine.reserved <= memory:
                needed = self._changes(flags)
                found.setdefault(str(sorted(needed)), needed)
        if not found:
            raise PlanError(f"no combination of {', '.join(axes)} can run on {self._world_size} processes: {refused}")
        return list(found.values())

    def _changes(self, flags: Flags) -> Flags:
        """Those without which the configuration would be another one."""
        whole, kept = self._load(flags), list(flags)
        for flag in flags:
            rest = [other for other in kept if other != flag]
            with contextlib.suppress(ConfigError):  # flags that need each other
                if self._load(rest) == whole:
                    kept = rest
        return tuple(kept)


def _flags(key: str, value: str) -> Flags:
    return _GROUPS[key][value] if key in _GROUPS else (f"--{key}={value}",)


def least_bytes(config: Config, model: Model, layout: Layout) -> int:
    """Weights, gradients and optimizer of a rank, if all that can be split is split evenly.

    Example:
        Qwen3-30B-A3B on one GPU: 30.5 G parameters of 2 bytes with gradients of 4 and an optimizer of 12.
    """
    size = DTYPES[config.model.dtype].itemsize
    held = sum(count for count, _ in buffers(model.parameters, model.expert_parameters, layout))
    trained = sum(count for count, _ in buffers(*model.trained, layout))
    kept = optimizer_bytes_on_device(config) * model.trained[0] / layout.world_size
    return size * held + gradient_bytes(config) * trained + round(kept)

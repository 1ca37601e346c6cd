"""Search over settings of a run: rehearse them, then rank those that fit by speed."""

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from megatron_dppo.config.layout import Layout, layer_split, resolve_layout
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import ConfigError, PlanError, UserError
from megatron_dppo.parallel.platform import DTYPES
from megatron_dppo_plan.arithmetic import gradient_buffers, gradient_bytes, optimizer_bytes_on_device
from megatron_dppo_plan.machine import GpuNode
from megatron_dppo_plan.plan import TIGHT, Plan, PlannedModel, make_plan
from megatron_dppo_plan.rehearsal_pool import RehearsalPool, RehearsalTimeout
from megatron_dppo_plan.rehearse import rank_roles

Flags = tuple[str, ...]
LoadConfig = Callable[[Sequence[str]], Config]
"""Function that loads the configuration with additional flags."""

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
"""Flags of the search key ``recompute`` by value."""

OFFLOAD: Mapping[str, Flags] = {
    "optimizer": ("--optimizer-cpu-offload", "--use-precision-aware-optimizer"),
    "none": ("--no-optimizer-cpu-offload", "--no-use-precision-aware-optimizer"),
}

_NUM_NAMED = 3
"""Combinations that are named among those that a time limit leaves out."""

_FLAG_GROUPS = {"recompute": RECOMPUTE, "offload": OFFLOAD}

_SIZES = ("1", "2", "4", "8", "16", "32", "64")
DEFAULT_AXES: Mapping[str, Sequence[str]] = {
    "tensor-model-parallel-size": _SIZES[:4],
    "pipeline-model-parallel-size": _SIZES[:5],
    "context-parallel-size": _SIZES[:4],
    "expert-model-parallel-size": _SIZES,
    "recompute": tuple(RECOMPUTE),
}
"""Axes of a search without arguments. The search for the nearest settings that fit also tries to offload."""


@dataclass(frozen=True)
class Candidate:
    """Settings with a valid layout."""

    flags: Flags
    plan: Plan | None
    """None if the settings cannot be rehearsed."""
    reason: str = ""
    """Error of settings without a plan."""

    @property
    def sort_key(self) -> tuple[bool, bool, bool, float]:
        """Sort key: first what fits with room to spare, then tight, too large, not runnable; each by time."""
        if self.plan is None:
            return True, True, True, 0.0
        return False, self.plan.free_bytes < 0 or not self.plan.fits_host, self.plan.is_tight, self.plan.step.updates


def parse_axes(texts: Sequence[str]) -> Mapping[str, Sequence[str]]:
    """Parse ``KEY=VALUE,VALUE`` arguments into values by key. Without any, return ``DEFAULT_AXES``.

    Example:
        >>> parse_axes(["--train.micro_batch_tokens=8192,16384"])
        {'train.micro_batch_tokens': ['8192', '16384']}
    """
    axes: dict[str, Sequence[str]] = {}
    for text in texts:
        name, equals, values = text.removeprefix("--").partition("=")
        if not name or not equals or not values:
            raise PlanError(f"--search {text}: expected KEY=VALUE,VALUE such as tensor-model-parallel-size=1,2")
        # A dotted key is one of ours; the others are Megatron's flags, which have dashes.
        axes[name.replace("_", "-") if "." not in name else name] = values.split(",")
        if name in _FLAG_GROUPS and (unknown := set(axes[name]) - set(_FLAG_GROUPS[name])):
            raise PlanError(f"--search {text}: expected {', '.join(_FLAG_GROUPS[name])}, got {unknown.pop()!r}")
    return axes or DEFAULT_AXES


@dataclass
class PlanSearch:
    """Search for settings of a run. Combinations that the time limit ``seconds`` leaves out are in ``untried``."""

    load: LoadConfig
    world_size: int
    machine: GpuNode
    rehearsals: RehearsalPool
    seconds: float = math.inf
    mean_response: int | None = None
    untried: str | None = field(default=None, init=False)
    """Combinations that the last search did not try within its time limit. None if it tried all."""

    @cached_property
    def _model(self) -> PlannedModel:
        return PlannedModel.from_config(self.load(()))

    def rank_all(self, axes: Mapping[str, Sequence[str]], on_progress: Callable[[int, int], None]) -> list[Candidate]:
        """Rehearse every combination with a valid layout and static memory that fits, and sort them.

        ``on_progress`` gets the number of combinations and of those that are done.
        """
        self._start_clock()
        # Small groups communicate least, so combinations with them are tried first.
        feasible = sorted(self.feasible_flags(axes, self.machine.memory), key=self._replica_ranks)
        candidates: list[Candidate] = []
        for candidate in self._rehearse_all(feasible):
            candidates.append(candidate)
            on_progress(len(feasible), len(candidates))
        if not candidates:
            raise PlanError(f"No combination was rehearsed in time: {self.untried}")
        return sorted(candidates, key=lambda candidate: candidate.sort_key)

    def _replica_ranks(self, flags: Flags) -> int:
        if not flags:
            return 0  # the configuration itself comes first
        layout = self._layout(self.load(flags))
        return layout.tp * layout.pp * layout.cp

    def _start_clock(self) -> None:
        self.untried = None
        self.rehearsals.end = time.monotonic() + self.seconds

    def _rehearse_all(self, feasible: Sequence[Flags]) -> Iterator[Candidate]:
        """Yield the candidates that are rehearsed within the time limit; the rest is in ``untried``."""
        for index, flags in enumerate(feasible):
            try:
                yield self._rehearse(flags)
            except RehearsalTimeout:
                names = "; ".join(" ".join(each) or "(as configured)" for each in feasible[index : index + _NUM_NAMED])
                self._add_untried(f"{len(feasible) - index} of {len(feasible)} combinations, the next ones: {names}")
                return

    def _add_untried(self, text: str) -> None:
        known = "" if self.untried is None else f"{self.untried}\n"
        self.untried = (
            f"{known}Not tried within {self.seconds:g} s: {text}. Fix: --search with fewer values, or --search-seconds"
        )

    def find_nearest(self, count: int) -> Iterator[Candidate]:
        """Yield up to ``count`` settings that fit with room to spare, those with the fewest changes first.

        Raises ``PlanError`` if the static memory of no combination fits.
        """
        self._start_clock()
        axes = {**DEFAULT_AXES, "offload": tuple(OFFLOAD)}
        feasible = sorted(self.feasible_flags(axes, round((1 - TIGHT) * self.machine.memory)), key=len)
        fitting = (candidate for candidate in self._rehearse_all(feasible) if not any(candidate.sort_key[:3]))
        return itertools.islice(fitting, count)

    def _layout(self, config: Config) -> Layout:
        return resolve_layout(
            config.parallel, config.batch, self.world_size, self._model.shape, config.model.transformer
        )

    def _rehearse(self, flags: Flags) -> Candidate:
        config = self.load(flags)
        layout = self._layout(config)
        kinds = rank_roles(layout, self._model.shape.num_experts is not None)
        # "hot" needs at least as much as the other ranks of its stage, and middle stages need less than the ends.
        needed = [kind for kind in kinds if kind == "last" or ("hot" in kinds) == (kind == "hot")]
        try:
            plan = make_plan(
                config,
                self.world_size,
                self.machine,
                self.rehearsals,
                model=self._model,
                kinds=list(kinds) if layer_split(config.model.transformer) else needed,
                few_layers=True,
                mean_response=self.mean_response,
            )
        except RehearsalTimeout:
            raise
        except UserError as error:
            return Candidate(flags, None, str(error))
        return Candidate(flags, plan)

    def feasible_flags(self, axes: Mapping[str, Sequence[str]], memory: int) -> list[Flags]:
        """Return the minimal flags of all combinations with a valid layout and static memory that fits."""
        feasible: dict[str, Flags] = {}
        reason = f"weights, gradients and optimizer alone do not fit {self.machine.name}"
        combinations = list(itertools.product(*axes.values()))
        for index, values in enumerate(combinations):
            if time.monotonic() > self.rehearsals.end:
                self._add_untried(f"{len(combinations) - index} of {len(combinations)} combinations, not even checked")
                break
            flags = tuple(itertools.chain.from_iterable(map(_flags, axes, values)))
            try:
                config = self.load(flags)
                layout = self._layout(config)
            except ConfigError as error:
                reason = str(error)
                continue
            if min_rank_bytes(config, self._model, layout) + self.machine.reserved <= memory:
                minimal = self._minimal_flags(flags)
                feasible.setdefault(str(sorted(minimal)), minimal)
        if not feasible:
            raise PlanError(f"no combination of {', '.join(axes)} can run on {self.world_size} processes: {reason}")
        return list(feasible.values())

    def _minimal_flags(self, flags: Flags) -> Flags:
        """Remove flags without which the configuration stays the same."""
        config = self.load(flags)
        minimal = list(flags)
        for flag in flags:
            without = [other for other in minimal if other != flag]
            # Without a flag that another one needs, the configuration is invalid: keep it.
            with contextlib.suppress(ConfigError):
                if self.load(without) == config:
                    minimal = without
        return tuple(minimal)


def _flags(key: str, value: str) -> Flags:
    return _FLAG_GROUPS[key][value] if key in _FLAG_GROUPS else (f"--{key}={value}",)


def min_rank_bytes(config: Config, model: PlannedModel, layout: Layout) -> int:
    """Return the static bytes of a rank (weights, gradients, optimizer) if everything is split evenly.

    Example:
        Qwen3-30B-A3B on one GPU: 30.5 G parameters with 2 bytes of weight, 4 of gradient and 12 of optimizer.
    """
    size = DTYPES[config.model.dtype].itemsize
    parameters = sum(count for count, _ in gradient_buffers(model.parameters, model.expert_parameters, layout))
    trained = sum(count for count, _ in gradient_buffers(*model.trained, layout))
    optimizer = optimizer_bytes_on_device(config) * model.trained[0] / layout.world_size
    return size * parameters + gradient_bytes(config) * trained + round(optimizer)

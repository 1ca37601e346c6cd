"""Measurement of one optimizer update of a policy, on real and on rehearsed ranks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.config.layout import Layout
from megatron_dppo.config.schema import Config
from megatron_dppo.head.teacher import TeacherTargets
from megatron_dppo.hf.weight_files import WeightSource
from megatron_dppo.losses import Objective
from megatron_dppo.mcore import forward, head, offload, optim, router_replay
from megatron_dppo.mcore.model_parts import Placement
from megatron_dppo.mcore.setup import initialize_megatron
from megatron_dppo.parallel.platform import Platform
from megatron_dppo.policy.trainer import PolicyTrainer
from megatron_dppo.run.policy_setup import trainer_from_config
from megatron_dppo.types import MicroBatch
from megatron_dppo_plan import megatron_replacements
from megatron_dppo_plan.measurement import STATIC, TEACHER, UpdateMeasurement
from megatron_dppo_plan.meter import HOST, Meter

_OBJECT_EXCHANGE = "objects"
"""Phase of Python objects that ranks exchange, pickled, over the CPU. It is not counted."""


def trainer_builder(
    config: Config, hf_config: Any, layout: Layout, platform: Platform, weights: WeightSource
) -> Callable[[], PolicyTrainer]:
    """Join the process groups of a layout and return a function that builds the trainer in them."""
    groups = initialize_megatron(layout, platform, seed=1, timeout_minutes=3)

    def build() -> PolicyTrainer:
        placement = Placement(hf_config, layout, groups, platform)
        return trainer_from_config(config, placement, weights, noise=config.train.layer_noise)

    return build


def measure_update(
    build: Callable[[], PolicyTrainer],
    batches: Sequence[MicroBatch],
    objective: Objective,
    meter: Meter,
    make_targets: Callable[[], TeacherTargets] | None = None,
) -> UpdateMeasurement:
    """Build a trainer and measure its first update.

    The meter is not entered yet. ``make_targets`` returns a teacher's targets for each micro-batch.
    """
    with meter, phases(meter):
        with meter.during("start"):
            trainer = build()
        # Attribute what stays between updates to its own names; the rest of the start stays "start".
        for name, tensors in _static_tensors(trainer).items():
            meter.relabel(tensors, name)
        start_peak = meter.peak
        static = {name: meter.bytes_in_phase(name) for name in STATIC}
        static["other"] = meter.bytes_in_use - sum(static.values())
        meter.start_step()
        with meter.during(TEACHER):
            teacher_targets = [] if make_targets is None else [make_targets()] * len(batches)
        with meter.during("forward"):
            trainer.apply(trainer.accumulate(batches, objective, teacher_targets))
        return UpdateMeasurement(
            static=static,
            start_peak=start_peak,
            peaks=dict(meter.peaks),
            micro_batches=len(batches),
            collectives=sorted(
                (key.phase, key.name, key.ranks, count, meter.sent[key])
                for key, count in meter.collectives.items()
                if key.phase != _OBJECT_EXCHANGE
            ),
            work={phase: work for phase, work in meter.work.items() if phase != HOST},
            host=meter.bytes_in_phase(HOST),
        )


def _static_tensors(trainer: PolicyTrainer) -> dict[str, list[Tensor]]:
    """Return the tensors of each name in ``STATIC``. Memory that two names share counts for the first."""
    parameters = [parameter for model in trainer.models for parameter in model.parameters()]
    # Megatron's DDP keeps gradients in ``main_grad``.
    gradients = [grad for p in parameters if isinstance(grad := getattr(p, "main_grad", None), Tensor)]
    return dict(
        zip(STATIC, (list(parameters), gradients, list(optim.optimizer_tensors(trainer.optimizer))), strict=True)
    )


@contextmanager
def phases(meter: Meter) -> Iterator[None]:
    """Attribute the parts of an update within the block to phases, by wrapping the functions that run them."""
    targets: list[tuple[Any, str, str]] = [
        (head.OutputHead, "loss", "head"),
        (vars(forward)["MicroBatchRow"], "from_batch", "row"),  # vars(): a rehearsal replaces this class
        (router_replay.ReplayDriver, "_begin", "replay"),
        (optim.Optimizer, "step", "update"),
        (dist, "all_gather_object", _OBJECT_EXCHANGE),
        (torch.optim.Adam, "step", HOST),  # also AdamW's; only an offloaded optimizer uses torch's Adam
        *megatron_replacements.schedule_phases(),
        *((owner, name, HOST) for owner, name in offload.HOST_ALLOCATIONS),
    ]
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in targets]
    for owner, name, phase in targets:
        setattr(owner, name, _in_phase(getattr(owner, name), phase, meter, vars(owner)[name]))
    try:
        yield
    finally:
        for owner, name, original in before:
            setattr(owner, name, original)


def _in_phase(function: Any, phase: str, meter: Meter, declared: object) -> Any:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with meter.during(phase):
            result = function(*args, **kwargs)
        if phase == HOST:
            meter.relabel_device_tensors(offload.gpu_tensors(args[0]), "optimizer")
        return result

    # ``getattr`` has bound the class already.
    return staticmethod(call) if isinstance(declared, classmethod) else call

"""One optimizer update of a policy under a meter: the same for real ranks and for rehearsed ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.commands.plan.measured import STATIC, TEACHER, Measured
from megatron_dppo.commands.plan.meter import HOST, Meter
from megatron_dppo.config.layout import Layout
from megatron_dppo.config.schema import Config
from megatron_dppo.head.teacher import TeacherTargets
from megatron_dppo.losses import Objective
from megatron_dppo.mcore import forward, head, offload, optim, rehearsal, router_replay
from megatron_dppo.mcore.bridge import WeightSource
from megatron_dppo.mcore.setup import initialize_megatron
from megatron_dppo.parallel.platform import Platform
from megatron_dppo.policy.trainer import PolicyTrainer
from megatron_dppo.types import MicroBatch

_OBJECTS = "objects"
"""Numbers that ranks tell each other, pickled over the CPU: not counted."""


def trainer_builder(
    config: Config, hf_config: Any, layout: Layout, platform: Platform, weights: WeightSource
) -> Callable[[], PolicyTrainer]:
    """Joins the process groups of a layout, and gives what builds the trainer in them."""
    groups = initialize_megatron(layout, platform, seed=1, timeout_minutes=3)
    return lambda: PolicyTrainer(
        model=config.model,
        lora=config.lora,
        parallel=config.parallel,
        train=config.train,
        rollout=config.rollout,
        seed=config.run.seed,
        hf_config=hf_config,
        weights=weights,
        layout=layout,
        groups=groups,
        platform=platform,
        optimizer=config.optimizer,
        total_steps=1,
        noise=config.train.layer_noise,
    )


def measured_update(
    build: Callable[[], PolicyTrainer],
    batches: Sequence[MicroBatch],
    objective: Objective,
    meter: Meter,
    make_targets: Callable[[], TeacherTargets] | None = None,
) -> Measured:
    """Build a trainer and do its first update, each micro-batch with a teacher's targets if they are given."""
    with meter, phases(meter):
        with meter.during("start"):
            trainer = build()
        for name, tensors in _kept(trainer).items():
            meter.relabel(tensors, name)
        start_peak = meter.peak
        static = {name: meter.of_phase(name) for name in STATIC}
        static["other"] = meter.now - sum(static.values())
        meter.start_step()
        with meter.during(TEACHER):
            teacher_targets = [] if make_targets is None else [make_targets()] * len(batches)
        with meter.during("forward"):
            trainer.apply(trainer.accumulate(batches, objective, teacher_targets))
        return Measured(
            static=static,
            start_peak=start_peak,
            peaks=dict(meter.peaks),
            micro_batches=len(batches),
            collectives=sorted(
                (key.phase, key.name, key.ranks, count, meter.sent[key])
                for key, count in meter.collectives.items()
                if key.phase != _OBJECTS
            ),
            work={phase: work for phase, work in meter.work.items() if phase != HOST},
            host=meter.of_phase(HOST),
        )


def _kept(trainer: PolicyTrainer) -> dict[str, list[Tensor]]:
    """The tensors of ``STATIC``; of what shares memory the first name counts."""
    parameters = [parameter for model in trainer.models for parameter in model.parameters()]
    gradients = [found for p in parameters if isinstance(found := getattr(p, "main_grad", None), Tensor)]
    return dict(
        zip(STATIC, (list(parameters), gradients, list(optim.optimizer_tensors(trainer.optimizer))), strict=True)
    )


@contextmanager
def phases(meter: Meter) -> Iterator[None]:
    """Name the parts of an update within the block."""
    places: list[tuple[Any, str, str]] = [
        (head.OutputHead, "loss", "head"),
        (vars(forward)["MicroBatchRow"], "from_batch", "row"),  # a rehearsal has put another one there
        (router_replay.ReplayDriver, "_begin", "replay"),
        (optim.Optimizer, "step", "update"),
        (dist, "all_gather_object", _OBJECTS),
        (torch.optim.Adam, "step", HOST),  # AdamW's too: that of the host, of an offloaded optimizer
        *rehearsal.schedule_phases(),
        *((owner, name, HOST) for owner, name in offload.PLACES),
    ]
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in places]
    for owner, name, phase in places:
        setattr(owner, name, _named(getattr(owner, name), phase, meter, vars(owner)[name]))
    try:
        yield
    finally:
        for owner, name, original in before:
            setattr(owner, name, original)


def _named(function: Any, phase: str, meter: Meter, declared: object) -> Any:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with meter.during(phase):
            result = function(*args, **kwargs)
        if phase == HOST:
            meter.to_device(offload.gpu_tensors(args[0]), "optimizer")
        return result

    return staticmethod(call) if isinstance(declared, classmethod) else call

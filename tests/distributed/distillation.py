"""A policy and its teacher on a layout, against both in one process in float64.

The reference runs transformers' models one sequence at a time and writes the divergences down as they are defined.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.config.loss import LossConfig
from megatron_dppo.hf.folder import DictWeights, build_hf_model, stream_model
from megatron_dppo.losses import policy_objective
from megatron_dppo.parallel.platform import Platform
from megatron_dppo.policy.update import Updater
from megatron_dppo.report.clock import Clock
from megatron_dppo.types import Divergence, SamplingMask, TrainingSample, VersionSpan
from tests.distributed.families import LINEAR
from tests.distributed.layouts import CP, EP, ETP, PP, TP, VPP
from tests.distributed.objective import (
    TEMPERATURE,
    TOLERANCE,
    distribution,
    in_float64,
    make_samples,
    model_of,
    statistics,
)
from tests.distributed.parity import (
    Case,
    build_trainer,
    case_family,
    config_for,
    gradient_reader,
    hf_config,
    on_cpu,
    use_small_chunks,
)
from tests.distributed.plain_losses import plain_loss
from tests.reference_run import assert_gradient
from tests.unit.head.test_distillation_head import plain

DPPO = {"divergence_threshold_low": 0.04, "divergence_threshold_high": 0.04}
LOSSES: dict[str, dict[str, Any]] = {
    "dppo": {"name": "dppo_binary_tv"} | DPPO,
    "topk": {"name": "dppo_topk_kl", "topk": 6, "aggregation": "seq_mean_token_mean"} | DPPO,
    "gspo": {"name": "gspo", "clip_ratio_low": 0.05, "clip_ratio_high": 0.05},
}
DIVERGENCES = {
    "reverse_kl": Divergence("reverse_kl", coef=0.7),
    "forward_kl": Divergence("forward_kl", coef=0.5),
}


@dataclass(frozen=True)
class Lecture:
    """One layout with its teacher and the loss."""

    case: Case
    divergence: str
    loss: str = "dppo"
    dense_teacher: bool = False
    by_layer: bool = False
    teacher_family: str = ""
    """Family of the teacher, of ``tests.distributed.families``. Empty: a Qwen3-MoE, or a dense Qwen3."""


GRID: dict[int, list[Lecture]] = {
    1: [
        Lecture(Case(), "reverse_kl"),
        Lecture(Case(tied=True), "forward_kl", "topk", dense_teacher=True, by_layer=True),
        Lecture(Case(micro_batch_tokens=29), "forward_kl", "gspo"),
    ],
    2: [
        Lecture(Case(TP, family="qwen3_next"), "reverse_kl", dense_teacher=True),
        Lecture(Case(CP), "reverse_kl", "gspo", by_layer=True, teacher_family="qwen3_5_moe_text"),
        Lecture(Case(PP, tied=True), "forward_kl", by_layer=True),
        Lecture(Case(EP), "forward_kl", "topk", dense_teacher=True),
    ],
    4: [
        Lecture(Case({**TP, **CP}), "forward_kl", "gspo"),
        Lecture(Case({**CP, **PP}), "forward_kl", dense_teacher=True),
        Lecture(Case({**TP, **ETP}), "reverse_kl", "topk"),
        Lecture(Case({**TP, **PP}, dense=True), "reverse_kl"),
    ],
}
MORE: dict[int, list[Lecture]] = {
    2: [
        Lecture(Case(layout, dense=dense), divergence, loss, dense_teacher=other, by_layer=j == 3)
        for i, layout in enumerate((TP, CP, PP, VPP, EP))
        for j, (divergence, loss) in enumerate(
            (("reverse_kl", "gspo"), ("forward_kl", "dppo"), ("reverse_kl", "topk"), ("forward_kl", "gspo"))
        )
        for dense, other in [((i + j) % 3 == 0 and layout is not EP, (i + j) % 2 == 0)]
    ]
    + [
        Lecture(Case(layout, family=family), "forward_kl", loss, by_layer=i % 2 == 0, teacher_family=teacher)
        for i, layout in enumerate((TP, CP, PP, VPP, EP))
        for family, loss, teacher in ((LINEAR[0], "topk", LINEAR[1]), (LINEAR[1], "gspo", LINEAR[0]))
    ]
}


@cache
def teacher_model(dense: bool, family: str) -> Any:
    """Another model over the same vocabulary: other width, layers, experts and sharpness."""
    config = hf_config(tied=False, dense=dense, family=family)
    config.hidden_size = 96
    config.num_key_value_heads = 4
    config.num_hidden_layers = 7  # two pipeline stages get four and three
    config.layer_types = None
    if not dense:
        config.num_experts = 4
    model = build_hf_model(type(config)(**config.to_dict()), torch.float32, seed=7)
    with torch.no_grad():
        model.lm_head.weight.mul_(3.0)
    return model


@dataclass
class Expected:
    """Return the columns of one lecture, all samples together."""

    loss: float
    gradients: dict[str, Tensor]
    reverse: float
    forward: float
    teacher_logprobs: list[Tensor]


def make_expected(lecture: Lecture, samples: list[TrainingSample]) -> Expected:
    """Everything in float64."""
    student, teacher = (
        in_float64(model_of(lecture.case)),
        in_float64(teacher_model(lecture.dense_teacher, lecture.teacher_family)),
    )
    inputs = statistics(student, samples)
    loss, _ = plain_loss(inputs, LossConfig(**LOSSES[lecture.loss]))
    divergence, mask = DIVERGENCES[lecture.divergence], inputs.loss_mask
    with torch.no_grad():
        log_q = [distribution(teacher, sample.tokens) for sample in samples]
    log_p = [distribution(student, sample.tokens) for sample in samples]
    rows = zip(log_p, log_q, samples, strict=True)
    terms = [plain(divergence, p, q)[sample.loss_mask] for p, q, sample in rows]
    means = LOSSES[lecture.loss].get("aggregation") or lecture.loss == "gspo"
    taught = torch.stack([t.mean() for t in terms]).mean() if means else torch.cat(terms).mean()
    total = loss + divergence.coef * taught
    student.zero_grad()
    total.backward()
    assert_gradient(parameter.grad for parameter in student.parameters())
    holder = build_hf_model(student.config, torch.float64)
    for target, source in zip(holder.parameters(), student.parameters(), strict=True):
        target.data = torch.zeros_like(source) if source.grad is None else source.grad.clone()
    whole = torch.cat(log_p).detach()[mask], torch.cat(log_q)[mask]
    return Expected(
        loss=float(total.detach()),
        gradients={name: value.clone() for name, value in stream_model(holder)},
        reverse=float(plain(Divergence("reverse_kl"), *whole).mean()),
        forward=float(plain(Divergence("forward_kl"), *whole).mean()),
        teacher_logprobs=[q.gather(1, s.labels[:, None])[:, 0] for q, s in zip(log_q, samples, strict=True)],
    )


def make_all(lectures: list[Lecture]) -> list[tuple[list[TrainingSample], Expected]]:
    """The samples of each lecture's policy, and what to expect."""
    drawn: dict[tuple[str, bool], list[TrainingSample]] = {}
    result = []
    for lecture in lectures:
        key = (case_family(lecture.case), lecture.case.tied)
        if key not in drawn:
            with torch.no_grad():
                drawn[key] = make_samples(in_float64(model_of(lecture.case)))
        result.append((drawn[key], make_expected(lecture, drawn[key])))
    return result


def check(lecture: Lecture, samples: list[TrainingSample], expected: Expected, platform: Platform) -> None:
    """Gradients of every parameter, loss, KLs, and the teacher's log-probabilities."""
    from megatron_dppo.mcore.model_parts import Placement
    from megatron_dppo.mcore.teacher_model import MegatronTeacher

    chosen = DIVERGENCES[lecture.divergence]
    more: dict[str, Any] = {"teacher_offload": "layer"} if lecture.by_layer else {}
    sections: dict[str, dict[str, Any]] = {
        "rollout": {"temperature": TEMPERATURE},
        "loss": LOSSES[lecture.loss],
        "distillation": {"teacher_path": "unused", "divergence": chosen.name, "coef": chosen.coef} | more,
    }
    trainer = build_trainer(lecture.case, model_of(lecture.case), platform, "fp32", **sections)
    config, model = config_for(lecture.case, **sections), teacher_model(lecture.dense_teacher, lecture.teacher_family)
    teacher = MegatronTeacher(
        model=config.model,
        distillation=config.distillation,
        temperature=config.rollout.temperature,
        placement=Placement(model.config, trainer.layout, trainer.groups, platform),
        weights=DictWeights(stream_model(model)),
    )
    assert not any(p.numel() for chunk in teacher.chunks for p in chunk.parameters()), "it is away between passes"
    local_samples = samples[trainer.dp_rank :: trainer.layout.dp]
    updater = Updater(trainer, config.train, config.loss, scoring_teacher=teacher)
    wanted = expected.teacher_logprobs[trainer.dp_rank :: trainer.layout.dp]
    for sample, want in zip(updater.add_recomputed(local_samples, Clock()), wanted, strict=True):
        if sample.teacher_logprobs is not None:
            assert (sample.teacher_logprobs - want)[sample.loss_mask].abs().max() < TOLERANCE
        else:
            assert not trainer.is_last_stage
    batches = updater.pack_batches(local_samples)
    assert len(batches) * trainer.layout.dp >= 4
    metrics = trainer.accumulate(batches, policy_objective(config.loss), teacher.compute_targets(batches))
    actual = on_cpu(trainer.bridge.export(gradient_reader(trainer)))
    typical = sum(float(g.norm()) for g in expected.gradients.values()) / len(expected.gradients)
    wrong = {
        name: float((actual[name] - g).norm() / max(float(g.norm()), 0.01 * typical))
        for name, g in expected.gradients.items()
    }
    name = max(wrong, key=lambda n: wrong[n])
    assert wrong[name] < TOLERANCE, f"{lecture}: the gradient of {name} is off by {wrong[name]:.1e}"
    assert abs(metrics["loss"] - expected.loss) < TOLERANCE, (lecture, metrics["loss"], expected.loss)
    assert abs(metrics["teacher_reverse_kl"] - expected.reverse) < TOLERANCE
    assert abs(metrics["teacher_forward_kl"] - expected.forward) < TOLERANCE


def run(rank: int, world_size: int, lectures: list[Lecture], file: Path) -> None:
    """Several lectures in one set of processes; ``file`` has what ``make_all`` made."""
    from megatron_dppo.mcore.shims import apply_shims

    platform = Platform.detect(force_cpu=True)
    apply_shims(platform)
    use_small_chunks()
    from megatron.core import parallel_state

    with torch.serialization.safe_globals([Expected, SamplingMask, TrainingSample, VersionSpan]):
        known = torch.load(file, weights_only=True)
    for lecture, (samples, expected) in zip(lectures, known, strict=True):
        check(lecture, samples, expected, platform)
        dist.barrier()
        parallel_state.destroy_model_parallel()

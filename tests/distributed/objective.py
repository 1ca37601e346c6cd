"""The whole objective of every loss, per-parameter gradients included, against one process in float64.

The reference runs transformers' model in float64, one sequence at a time, takes every statistic from the whole
distribution, and has losses and aggregation of its own (``plain_losses``). It is computed once, in the parent, for the
variants that the layouts of a model take.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.config.loss import LossConfig
from megatron_dppo.hf.folder import build_hf_model, stream_model
from megatron_dppo.parallel.platform import Platform
from megatron_dppo.policy.update import Updater
from megatron_dppo.types import LossInputs, SamplingMask, TrainingSample, VersionSpan
from tests.distributed.families import in_float64
from tests.distributed.parity import (
    Case,
    build_trainer,
    case_family,
    config_for,
    gradient_reader,
    hf_reference,
    on_cpu,
    use_small_chunks,
)
from tests.distributed.plain_losses import plain_loss
from tests.distributed.sampling_masks import keep, top_p
from tests.reference_run import assert_gradient

SAMPLES, TOPK, TEMPERATURE, HORIZON = 10, 6, 0.7, 9
SHARPNESS = 4.0
"""Factor of the output layer: a distribution in which thresholds of the paper's size bite."""
TOLERANCE = 2e-5
_EXAMPLES = Path(__file__).parents[2] / "examples/losses"
_OWN = Path(__file__).with_name("user_functions.py")
_DPPO = {"divergence_threshold_low": 0.04, "divergence_threshold_high": 0.04}
VARIANTS: dict[str, dict[str, Any]] = {
    "dppo_binary_tv": _DPPO,
    "dppo_binary_kl": _DPPO | {"ratio_cap": 1.5},
    "dppo_topk_tv": _DPPO | {"topk": TOPK},
    "dppo_topk_kl": _DPPO | {"topk": TOPK},
    "dppo_topk_tv/evict": _DPPO | {"topk": TOPK, "topk_eviction": True, "form": "ratio"},
    "dppo_topk_tv/predictive": _DPPO | {"topk": TOPK, "direction": "predictive"},
    "dppo_topk_kl/predictive": _DPPO | {"topk": TOPK, "direction": "predictive", "topk_eviction": True},
    "dppo_topk_kl/predictive+seq": _DPPO | {"topk": TOPK, "direction": "predictive", "mismatch": "mask_sequence"},
    "score_centering": {"topk": TOPK},
    "dppo_binary_tv/centered": _DPPO | {"topk": TOPK, "centering": True},
    "dppo_topk_kl/centered": _DPPO | {"topk": TOPK, "centering": True, "kl_coef": 0.2},
    "grpo/centered": {"topk": TOPK, "centering": True},
    "drpo/centered": {
        "divergence_threshold_low": 0.3,
        "divergence_threshold_high": 0.4,
        "topk": TOPK,
        "centering": True,
    },
    "score_centering/mask_sequence": {"topk": TOPK, "centering": "none", "mismatch": "mask_sequence"},
    "dppo_topk_kl/seq_mean": _DPPO | {"topk": TOPK, "aggregation": "seq_mean_token_mean"},
    "dppo_binary_tv/age": {"threshold_age": 2.0, "divergence_threshold_low": 0.1, "divergence_threshold_high": 0.1},
    "grpo/age+knee": {"threshold_age": 3.0, "threshold_knee": 1.2, "threshold_floor": 0.2},
    "dppo_recompute_binary_tv": _DPPO,
    "dppo_recompute_binary_kl": _DPPO,
    "drpo": {"divergence_threshold_low": 0.3, "divergence_threshold_high": 0.4, "ratio_cap": 1.2},
    "spo": {"ratio_range": 1.5, "ratio_cap": 1.4},
    "vespo": {"weight_power_low": 1.0, "weight_decay_high": 1.0},
    "gmpo": {"log_clip_low": 0.05, "log_clip_high": 0.1},
    "ipo": _DPPO | {"form": "ratio"},
    "m2po": {"second_moment_limit": 0.02},
    "m2po/all": {"second_moment_limit": 0.03, "second_moment_tokens": "all"},
    "dppo_binary_tv/kl+entropy": _DPPO | {"kl_coef": 0.2, "entropy_coef": 0.1},
    "dppo_binary_tv/norm": _DPPO | {"aggregation": "seq_mean_token_sum_norm", "horizon": HORIZON},
    "dppo_binary_tv/mask_sequence": _DPPO | {"mismatch": "mask_sequence"},
    "grpo": {},
    "minirl": {"ratio_cap": 1.5},
    "pg_is": {"aggregation": "token_sum_norm", "horizon": HORIZON},
    "cispo": {"ratio_cap": 1.3},
    # A steeper gate amplifies the fp32 rounding of the ratio: 3 and 2 give 2.3e-5, 3.4 times the error of PG-IS.
    "sapo": {"gate_temperature_low": 1.05, "gate_temperature_high": 1.0},
    "trm": {"sequence_max": 0.15, "sequence_mean": 0.05},
    "trm/topk": {"topk": TOPK, "divergence": "topk", "sequence_max": 0.1, "sequence_mean": "off", "ratio_cap": 1.3},
    "trm/binary": {"divergence": "binary", "sequence_max": "off", "sequence_mean": 0.015, "form": "ratio"},
    "cppo": _DPPO | {"prefix_budget": 0.01, "position_floor": 0.5},
    "cppo/topk": {"divergence_threshold_low": 0.1, "topk": TOPK, "divergence": "topk", "prefix_budget": 0.03},
    "own/binary_tv": {"name": f"{_EXAMPLES}/dppo.py:binary_tv", "options": {"threshold": 0.04}},
    "own/topk_tv": {"name": f"{_EXAMPLES}/dppo.py:topk_total_variation", "options": {"threshold": 0.04}, "topk": TOPK},
    "own/centered": {"name": f"{_OWN}:centered", "options": {"cap": 2.0}, "topk": TOPK},
    "own/penalised": {"name": f"{_OWN}:penalised", "options": {"coefficient": 0.2}},
    "own/self_normalized": {"name": f"{_OWN}:SelfNormalized"},
    "dppo_binary_tv/own_mask": _DPPO | {"mask": f"{_OWN}:ratio_mask", "mask_options": {"low": 0.5, "high": 2.0}},
    "gspo": {"clip_ratio_low": 0.05, "clip_ratio_high": 0.05},
    "gspo/kl": {"clip_ratio_low": 0.05, "clip_ratio_high": 0.05, "kl_coef": 0.2},
    "ppo_clip": {"dual_clip": 1.5},
    "ppo_decoupled": {"mismatch": "truncate"},
}
"""Name of a variant (what follows a slash is ours) -> its settings."""


def loss_config(variant: str) -> LossConfig:
    """The configuration of a variant."""
    return LossConfig(**{"name": variant.partition("/")[0], **VARIANTS[variant]})


_DOUBLES: dict[str, dict[str, Any]] = {
    "own/binary_tv": {"name": "dppo_binary_tv"} | _DPPO,
    "own/topk_tv": {"name": "dppo_topk_tv", "topk": TOPK} | _DPPO,
    "own/centered": {"name": "score_centering", "topk": TOPK},
    "own/penalised": {"name": "pg_is", "kl_coef": 0.2, "kl_target": "rollout"},
    "dppo_binary_tv/own_mask": {"name": "dppo_binary_tv", "mismatch": "mask_sequence"} | _DPPO,
}
"""A user's function -> the built-in loss that it writes once more."""


def reference_config(variant: str) -> LossConfig:
    """Return the reference's configuration for a variant."""
    return LossConfig(**_DOUBLES[variant]) if variant in _DOUBLES else loss_config(variant)


@dataclass
class Reference:
    """The samples, and by variant the loss and its gradients."""

    samples: list[TrainingSample]
    losses: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, dict[str, Tensor]] = field(default_factory=dict)


def model_of(case: Case) -> Any:
    """The transformers model with a sharper output layer."""
    model = hf_reference(case.tied, case.dense, case.shared, case.dense_layers, case.family)
    with torch.no_grad():
        model.lm_head.weight.mul_(SHARPNESS)
    return model


def distribution(model: Any, tokens: Tensor) -> Tensor:
    """``[T, V]`` log-probabilities at the rollout's temperature."""
    return (model(tokens[None]).logits[0] / TEMPERATURE).log_softmax(-1)


def make_samples(model: Any, *, filtered: bool = False, count: int = SAMPLES) -> list[TrainingSample]:
    """Responses drawn from a policy near the model's, with that policy's Top-K; ragged lengths.

    Every fourth is drawn from the most probable tokens alone, so that slots of its Top-K have mu = 0 < pi; every fifth
    has advantage 0: only penalty and bonus have a gradient there. With ``filtered`` all but every seventh token are
    drawn from their top-p, which is then recorded.
    """
    generator = torch.Generator().manual_seed(2)
    vocabulary = model.config.vocab_size

    def near(log_p: Tensor, noise: float) -> Tensor:
        shift = noise * torch.randn(log_p.shape, generator=generator, dtype=torch.float64)
        return (log_p + shift).log_softmax(-1)

    result = []
    for i in range(count):
        ids = torch.randint(0, vocabulary, (2 + i % 4,), generator=generator)
        prompt, rows, sets = ids.numel(), [], list[Tensor]()
        for _ in range(2 + (5 * i) % 11):
            row = near(distribution(model, ids)[-1], 0.5)
            if i % 4 == 3:
                row = row.masked_fill(row < row.topk(TOPK - 2).values[-1], -torch.inf).log_softmax(-1)
            if filtered:
                sets.append(top_p(row) if len(rows) % 7 < 6 else row.new_zeros(0).int())
                row = keep(row[None], SamplingMask(sets[-1], torch.tensor([len(sets[-1])], dtype=torch.int32)))[0]
            rows.append(row)
            ids = torch.cat([ids, torch.multinomial(rows[-1].exp(), 1, generator=generator)])
        tokens, labels, first = ids[:-1], ids[1:], prompt - 1
        counts = torch.tensor([len(part) for part in sets], dtype=torch.int32)
        sampling_mask = SamplingMask(torch.cat(sets), counts) if filtered else None
        log_p, mu = keep(distribution(model, tokens), sampling_mask), torch.stack(rows)
        values, top = mu.topk(TOPK, dim=-1)
        outside = ~(top == labels[first:, None]).any(-1, keepdim=True)
        at_label = mu.gather(1, labels[first:, None])
        result.append(
            TrainingSample(
                tokens=tokens,
                labels=labels,
                loss_mask=torch.arange(tokens.numel()) >= first,
                advantages=torch.full((tokens.numel(),), (-1.0) ** i * (1 + 0.1 * i) * (i % 5 != 4)),
                rollout_logprobs=torch.cat([torch.zeros(first), at_label[:, 0].float()]),
                rollout_topk_ids=torch.cat([top, torch.where(outside, labels[first:, None], -1)], 1).int(),
                rollout_topk_logprobs=torch.cat([values, at_label], 1).float(),
                sampling_mask=sampling_mask,
                # The policy has version 0. The first half of every third response was sampled one update earlier.
                sources=_spans(-(i % 4), first, tokens.numel(), changes=i % 3 == 0),
                recomputed_logprobs=near(log_p, 0.3).gather(1, labels[:, None])[:, 0].float(),
                reference_logprobs=near(log_p, 0.8).gather(1, labels[:, None])[:, 0].float(),
            )
        )
    return result


def _spans(version: int, first: int, end: int, *, changes: bool) -> tuple[VersionSpan, ...]:
    middle = (first + end) // 2
    if not changes:
        return (VersionSpan(version, first, end),)
    return (VersionSpan(version - 1, first, middle), VersionSpan(version, middle, end))


def ages_of(sample: TrainingSample) -> Tensor:
    """Token by token, 0 outside the response."""
    versions = [[s.policy_version for s in sample.sources if s.start <= t < s.end] for t in range(sample.num_tokens)]
    return torch.tensor([-each[0] if each else 0 for each in versions], dtype=torch.float64)


def statistics(model: Any, samples: list[TrainingSample]) -> LossInputs:
    """All sequences end to end, nothing padded, every number from the whole distribution in float64."""
    rows = [keep(distribution(model, sample.tokens), sample.sampling_mask) for sample in samples]
    log_p, labels = torch.cat(rows), torch.cat([s.labels for s in samples])

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(sample, name) for sample in samples])

    def slots(name: str, unused: float) -> Tensor:
        """Return values of all positions: samples have those of the response, which are the last ones."""
        own = [(getattr(sample, name), sample.num_tokens) for sample in samples]
        return torch.cat([torch.nn.functional.pad(x, (0, 0, n - len(x), 0), value=unused) for x, n in own])

    ids = slots("rollout_topk_ids", -1).long()
    valid = ids >= 0
    used = torch.zeros(log_p.shape, dtype=torch.bool).scatter(1, ids.clamp(min=0), valid)
    used.scatter_(1, torch.where(valid, ids, ids[:, :1].clamp(min=0)), valid | valid[:, :1])
    logprobs = log_p.gather(1, labels[:, None])[:, 0]
    moved = zip(logprobs.tolist(), joined("rollout_logprobs").tolist(), joined("loss_mask").tolist(), strict=True)
    # The lower of the two in the middle, as torch has it.
    differences = sorted(abs(p - m) for p, m, inside in moved if inside)
    return LossInputs(
        logprobs=logprobs,
        statistics={"mismatch_scale": differences[(len(differences) - 1) // 2]},
        entropy=-(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(-1),
        advantages=joined("advantages"),
        loss_mask=joined("loss_mask"),
        rollout_logprobs=joined("rollout_logprobs"),
        topk_logprobs=log_p.gather(1, ids.clamp(min=0)),
        rollout_topk_logprobs=slots("rollout_topk_logprobs", 0.0),
        topk_valid=valid,
        topk_other_logprob=torch.where(used, -torch.inf, log_p.detach()).logsumexp(-1),
        topk_other_square=torch.where(used, 0.0, log_p.detach().exp()).square().sum(-1),
        recomputed_logprobs=joined("recomputed_logprobs"),
        reference_logprobs=joined("reference_logprobs"),
        ages=torch.cat([ages_of(sample) for sample in samples]),
        sequence_ids=torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([len(row) for row in rows])),
    )


class ReferenceModel:
    """A model in float64 with its samples. Each variant is computed once."""

    def __init__(self, case: Case) -> None:
        self._model = in_float64(model_of(case))
        with torch.no_grad():
            self._samples = make_samples(self._model, filtered=case.filtered)
        self._inputs = statistics(self._model, self._samples)
        self._known = Reference(self._samples)

    def reference(self, variants: Iterable[str]) -> Reference:
        """Return the samples, losses and gradients of some variants."""
        for variant in variants:
            if variant not in self._known.losses:
                self._compute(variant)
        losses, gradients = self._known.losses, self._known.gradients
        return Reference(self._samples, {v: losses[v] for v in variants}, {v: gradients[v] for v in variants})

    def _compute(self, variant: str) -> None:
        self._model.zero_grad()
        loss = plain_loss(self._inputs, reference_config(variant))[0]
        loss.backward(retain_graph=True)
        assert_gradient(parameter.grad for parameter in self._model.parameters())
        self._known.losses[variant] = float(loss.detach())
        holder = build_hf_model(self._model.config, torch.float64)
        for target, source in zip(holder.parameters(), self._model.parameters(), strict=True):
            target.data = torch.zeros_like(source) if source.grad is None else source.grad.clone()
        self._known.gradients[variant] = {name: value.clone() for name, value in stream_model(holder)}


_MODELS: dict[str, ReferenceModel] = {}
"""Models by the name of their file, for all tests of a process."""


def dropped_shares() -> dict[str, float]:
    """Share of tokens that each variant drops in the reference of the plain model."""
    model = in_float64(model_of(Case()))
    with torch.no_grad():
        inputs = statistics(model, make_samples(model))
        return {variant: plain_loss(inputs, reference_config(variant))[1] for variant in VARIANTS}


def error_of(trainer: Any, reference: Reference, variant: str, case: Case) -> tuple[float, float]:
    """Relative error of the worst parameter's gradient, and absolute error of the loss."""
    local_samples = reference.samples[trainer.dp_rank :: trainer.layout.dp]
    loss = loss_config(variant)
    updater = Updater(trainer, config_for(case).train, loss)
    batches = updater.pack_batches(local_samples)
    assert len(batches) * trainer.layout.dp >= 4
    metrics = trainer.accumulate(batches, updater.objective(local_samples))
    actual = on_cpu(trainer.bridge.export(gradient_reader(trainer)))
    expected = reference.gradients[variant]
    assert actual.keys() == expected.keys()
    # Parameters whose gradient is nearly 0 (an expert that one token visits) are measured against the typical size.
    typical = sum(float(g.norm()) for g in expected.values()) / len(expected)
    error = max(float((actual[n] - g).norm() / max(float(g.norm()), 0.01 * typical)) for n, g in expected.items())
    return error, abs(metrics["loss"] - reference.losses[variant])


def _file_name(case: Case) -> str:
    return f"{case_family(case)} tied={case.tied} filtered={case.filtered}.pt"


def divide_variants(cases: list[Case], variants: Sequence[str]) -> list[tuple[Case, list[str]]]:
    """Give each layout another part of the variants."""
    return [(case, list(variants[number :: len(cases)])) for number, case in enumerate(cases)]


def write_references(folder: Path, work: list[tuple[Case, list[str]]]) -> Path:
    """Write the reference of each model in ``work`` for the workers; returns the folder."""
    variants: dict[str, set[str]] = defaultdict(set)
    for case, names in work:
        file = _file_name(case)
        variants[file].update(names)
        if file not in _MODELS:
            _MODELS[file] = ReferenceModel(case)
    for file, required in variants.items():
        torch.save(_MODELS[file].reference(sorted(required)), folder / file)
    return folder


def read_reference(folder: Path, case: Case) -> Reference:
    """Return the references that ``write_references`` made for the model of ``case``."""
    with torch.serialization.safe_globals([SamplingMask, Reference, TrainingSample, VersionSpan]):
        actual: Reference = torch.load(folder / _file_name(case), weights_only=True)
    return actual


def run(
    rank: int, world_size: int, work: list[tuple[Case, list[str]]], references: Path, report: str | None = None
) -> None:
    """Compare variants on layouts with their references.

    Args:
        rank: of this process.
        world_size: number of them.
        work: each layout with its variants.
        references: what ``write_references`` made.
        report: a file that gets a line for each comparison; None = no file.
    """
    from megatron_dppo.mcore.shims import apply_shims

    platform = Platform.detect(force_cpu=True)
    apply_shims(platform)
    use_small_chunks()
    from megatron.core import parallel_state

    lines = []
    for case, variants in work:
        reference = read_reference(references, case)
        entropy = {"entropy_coef": 0.1}  # so that the entropy keeps its gradient
        sections = {"rollout": {"temperature": TEMPERATURE}, "loss": entropy}
        trainer = build_trainer(case, model_of(case), platform, "fp32", **sections)
        for variant in variants:
            gradient, loss = error_of(trainer, reference, variant, case)
            lines.append(f"{trainer.layout} | {variant} | {gradient:.1e} | {loss:.1e}")
            assert gradient < TOLERANCE, f"{case}, {variant}, rank {rank}: gradient off by {gradient:.1e}"
            assert loss < TOLERANCE, f"{case}, {variant}, rank {rank}: loss off by {loss:.1e}"
        dist.barrier()
        parallel_state.destroy_model_parallel()
    if report is not None and rank == 0:
        with Path(report).open("a", encoding="utf-8") as out:
            out.writelines(line + "\n" for line in lines)

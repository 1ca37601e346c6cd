"""Adapters on every layout against transformers in float64, where each weight is W + s B A of leaves A and B."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.func import functional_call

from megatron_dppo.config.loss import LossConfig
from megatron_dppo.hf.families import get_family
from megatron_dppo.hf.families.rules import rename
from megatron_dppo.hf.folder import stream_model
from megatron_dppo.losses import policy_objective
from megatron_dppo.parallel.platform import Platform
from megatron_dppo.policy.update import Updater
from megatron_dppo.report.clock import Clock
from tests.distributed.objective import in_float64
from tests.distributed.parity import (
    BETAS,
    CLIP,
    EPS,
    LOSS,
    LR,
    SAMPLES,
    UPDATES,
    Case,
    build_trainer,
    config_for,
    gradient_reader,
    hf_reference,
    on_cpu,
    samples,
    worst,
)
from tests.reference_run import assert_gradient

RANK, ALPHA, TOLERANCE = 4, 6.0, 1e-5
PREFIX = "base_model.model."
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LINEAR = {
    "qwen3_next": (*ALL, "in_proj_qkvz", "in_proj_ba", "out_proj"),
    "qwen3_5_moe_text": (*ALL, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
}
"""Every layer that can have an adapter, of families with linear attention."""
MLP = ("gate_proj", "up_proj", "down_proj")
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
LATENT_PLAIN_QUERY = ("q_proj", *LATENT[2:])
"""Latent attention without a latent of queries."""
MIXTRAL = ("q_proj", "k_proj", "v_proj", "o_proj", "w1", "w2", "w3")
COLUMN_PARALLEL = ("linear_qkv", "linear_fc1", "in_proj", "linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj")
REPLICATED = ("linear_q_down_proj", "linear_kv_down_proj")


def adapter_names(weights: dict[str, Tensor], targets: tuple[str, ...]) -> Iterator[tuple[str, str, str]]:
    """Weight, A and B of each adapter, by PEFT's rule: the last part of a linear layer's name."""
    for name in weights:
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and module.rpartition(".")[2] in targets:
            yield name, f"{PREFIX}{module}.lora_A.weight", f"{PREFIX}{module}.lora_B.weight"


@dataclass
class Reference:
    """Results of a run of ``UPDATES`` updates in float64."""

    adapters: dict[str, Tensor] = field(default_factory=dict)
    """before the first update; B is random here"""
    merged: dict[str, Tensor] = field(default_factory=dict)
    logprobs: list[Tensor] = field(default_factory=list)
    base_logprobs: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    final: dict[str, Tensor] = field(default_factory=dict)


class Float64:
    """The transformers model with adapters."""

    def __init__(self, case: Case, targets: tuple[str, ...]) -> None:
        self.model = in_float64(hf_reference(case.tied, case.dense, case.shared, case.dense_layers, case.family))
        self.model.requires_grad_(False)
        self.base = dict(stream_model(self.model))
        self.names = list(adapter_names(self.base, targets))
        generator = torch.Generator().manual_seed(5)
        self.adapters: dict[str, Tensor] = {}
        for weight, a, b in self.names:
            rows, columns = self.base[weight].shape
            for name, shape in ((a, (RANK, columns)), (b, (rows, RANK))):
                value = 0.1 * torch.randn(shape, generator=generator, dtype=torch.float32)
                self.adapters[name] = value.double().requires_grad_()

    def weights(self) -> dict[str, Tensor]:
        """W + s B A by Hugging Face name."""
        merged = {w: self.base[w] + ALPHA / RANK * self.adapters[b] @ self.adapters[a] for w, a, b in self.names}
        return self.base | merged

    def logprobs(self, weights: dict[str, Tensor], indices: Sequence[int] = range(SAMPLES)) -> list[Tensor]:
        """Return the log-probabilities of these samples' labels."""
        parameters: dict[str, Tensor] = {}
        family = get_family(self.model.config)
        disk_names = family.disk_names
        weights = {rename(name, [(disk, usual) for usual, disk in disk_names]): w for name, w in weights.items()}
        for name, parameter in self.model.named_parameters():
            if name in weights:
                parameters[name] = weights[name]
                continue
            if family.fused_experts.is_interleaved:  # the experts of gpt-oss have no adapters
                parameters[name] = parameter
                continue
            layer, _, kind = name.rpartition(".")
            each = range(len(parameter))
            if kind == "down_proj":
                parameters[name] = torch.stack([weights[f"{layer}.{e}.down_proj.weight"] for e in each])
            else:
                parts = ("gate_proj", "up_proj")
                both = [torch.cat([weights[f"{layer}.{e}.{part}.weight"] for part in parts]) for e in each]
                parameters[name] = torch.stack(both)
        actual = []
        for sample in (samples()[i] for i in indices):
            logits = functional_call(self.model, parameters, (sample.tokens[None],)).logits[0]
            actual.append(logits.log_softmax(-1).gather(-1, sample.labels[:, None]).squeeze(-1))
        return actual

    def loss(self) -> Tensor:
        tokens = sum(int(s.loss_mask.sum()) for s in samples())
        total = torch.zeros((), dtype=torch.float64)
        for sample, logprobs in zip(samples(), self.logprobs(self.weights()), strict=True):
            assert sample.rollout_logprobs is not None
            weight = (logprobs.detach() - sample.rollout_logprobs).exp()
            total = total - (weight * sample.advantages * logprobs)[sample.loss_mask].sum() / tokens
        return total

    def gradients_at(self, adapters: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gradients of these adapters."""
        self.adapters = {name: adapters[name].double().requires_grad_() for name in self.adapters}
        leaves = list(self.adapters.values())
        gradients = torch.autograd.grad(self.loss(), leaves, allow_unused=True, materialize_grads=True)
        return dict(zip(self.adapters, gradients, strict=True))


def make_reference(case: Case, targets: tuple[str, ...]) -> Reference:
    """Everything of one model."""
    side = Float64(case, targets)
    leaves = list(side.adapters.values())
    optimizer = torch.optim.AdamW(leaves, lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0)
    result = Reference(adapters={name: value.detach().clone() for name, value in side.adapters.items()})
    with torch.no_grad():
        result.merged = {name: value.clone() for name, value in side.weights().items()}
        result.logprobs, result.base_logprobs = side.logprobs(side.weights()), side.logprobs(side.base)
    for _ in range(UPDATES):
        optimizer.zero_grad()
        side.loss().backward()
        assert_gradient(leaf.grad for leaf in leaves)
        zeros = {name: torch.zeros_like(value) for name, value in side.adapters.items()}
        result.gradients.append(
            {n: zeros[n] if value.grad is None else value.grad.clone() for n, value in side.adapters.items()}
        )
        result.norms.append(float(torch.nn.utils.clip_grad_norm_(leaves, CLIP)))
        optimizer.step()
    result.final = {name: value.detach() for name, value in side.adapters.items()}
    return result


def _file(folder: Path, case: Case, targets: tuple[str, ...]) -> Path:
    return folder / f"{case.tied}{case.dense}{case.shared}{case.dense_layers}{case.family}{'+'.join(targets)}.pt"


def write_references(folder: Path, cases: list[tuple[Case, tuple[str, ...]]]) -> None:
    """The reference of each model among the cases."""
    for case, targets in cases:
        file = _file(folder, case, targets)
        if not file.exists():
            torch.save(make_reference(case, targets), file)


def put(trainer: Any, values: dict[str, Tensor]) -> None:
    """Whole adapters into this rank's parameters, cut here once more."""
    from megatron_dppo.mcore.lora_layer import LinearAdapter

    groups = trainer.groups
    for model in trainer.models:
        for adapter in (m for m in model.modules() if isinstance(m, LinearAdapter)):
            rule, layer = adapter.target.rule, adapter.target.layer
            experts = list(range(8)) if rule.is_expert else [0]
            local = len(experts) // dist.get_world_size(groups.ep) if rule.is_expert else 1
            local_experts = experts[local * dist.get_rank(groups.ep) :][:local] if rule.is_expert else [0]
            group = groups.etp if rule.is_expert else groups.tp
            layer_name = rule.megatron.split(".")[-2]
            for projection in {name.split(".")[-2] for name in rule.hf} & adapter.target.targets:
                template = next(name for name in rule.hf if name.split(".")[-2] == projection)
                for part in ("A", "B"):
                    rows = []
                    for expert in local_experts:
                        module = template.format(layer=layer, expert=expert).removesuffix(".weight")
                        full = values[f"{PREFIX}{module}.lora_{part}.weight"]
                        if layer_name not in REPLICATED and (layer_name in COLUMN_PARALLEL) == (part == "B"):
                            # Queries, keys and values of linear attention in one weight: 32, 32 and 96 rows.
                            sizes = [32, 32, 96] if projection == "in_proj_qkv" else [len(full)]
                            dim = 0 if part == "B" else 1
                            pieces = full.split(sizes) if part == "B" else [full]
                            shards = [piece.chunk(dist.get_world_size(group), dim) for piece in pieces]
                            full = torch.cat([shard[dist.get_rank(group)] for shard in shards], dim)
                        rows.append(full)
                    target = adapter.parameter(projection, part).data
                    target.copy_(torch.stack(rows) if rule.is_expert else rows[0])


def error(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the error of the worst tensor. A tensor below .01 of the typical size is compared with that size."""
    assert actual.keys() == expected.keys(), sorted(actual.keys() ^ expected.keys())[:4]
    typical = sum(float(g.norm()) for g in expected.values()) / len(expected)
    return max(float((actual[n] - g).norm() / max(float(g.norm()), 0.01 * typical)) for n, g in expected.items())


def measure(case: Case, targets: tuple[str, ...], reference: Reference, platform: Platform) -> dict[str, float]:
    """Errors of everything about one layout."""
    trainer = build(case, targets, platform)
    base = dict(stream_model(hf_reference(case.tied, case.dense, case.shared, case.dense_layers, case.family)))
    started = on_cpu(trainer.export_weights())
    assert all(torch.equal(started[name], value) for name, value in base.items()), "B is not zero at the start"
    put(trainer, {name: value.float() for name, value in reference.adapters.items()})
    errors = {"adapters": worst(on_cpu(trainer.export_adapters()), reference.adapters)}
    errors["merged"] = worst(on_cpu(trainer.export_weights()), reference.merged)
    indices = range(trainer.dp_rank, len(samples()), trainer.layout.dp)
    own = [samples()[i] for i in indices]
    train = config_for(case).train
    updater = Updater(trainer, train, LossConfig(name="minirl"), with_reference=True)
    errors["logprobs"] = errors["reference"] = 0.0
    for sample, i in zip(updater.add_recomputed(own, Clock()), indices, strict=True):
        for name, actual, expected in (
            ("logprobs", sample.recomputed_logprobs, reference.logprobs[i]),
            ("reference", sample.reference_logprobs, reference.base_logprobs[i]),
        ):
            if actual is not None:
                apart = (actual - expected)[sample.loss_mask].norm() / expected[sample.loss_mask].norm()
                errors[name] = max(errors[name], float(apart))
    batches = Updater(trainer, train, LOSS).pack_batches(own)
    errors["gradient"] = errors["grad_norm"] = 0.0
    for step in range(UPDATES):
        before = on_cpu(trainer.export_adapters())
        trainer.optimizer.set_step(step)
        metrics = trainer.accumulate(batches, policy_objective(LOSS))
        actual = on_cpu(trainer.lora.export(gradient_reader(trainer)))
        apart = error(actual, reference.gradients[step])
        if step and not apart < TOLERANCE:
            # Adam carries the rounding of an update into the next gradients. In float64 the adapters of the run itself
            # move the third gradient of DeepSeek-V3 by 9e-5. At the same adapters all gradients agree.
            apart = error(actual, Float64(case, targets).gradients_at(before))
        errors["gradient"] = max(errors["gradient"], apart)
        norm = trainer.apply(metrics).grad_norm
        errors["grad_norm"] = max(errors["grad_norm"], abs(norm / reference.norms[step] - 1))
    errors["after"] = worst(on_cpu(trainer.export_adapters()), reference.final)
    check_frozen(trainer, base)
    return errors | {"drawn": drawn_error(trainer, case, targets, updater, indices, reference.base_logprobs)}


def drawn_error(
    trainer: Any, case: Case, targets: tuple[str, ...], updater: Updater, indices: range, base: list[Tensor]
) -> float:
    """Random adapters are one set on all ranks, of the right size, change the policy, and go away again."""
    side, before = Float64(case, targets), on_cpu(trainer.export_adapters())
    with trainer.lora.randomized():
        side.adapters = {name: value.double() for name, value in on_cpu(trainer.export_adapters()).items()}
        actual = updater.add_recomputed([samples()[i] for i in indices], Clock())
    after = on_cpu(trainer.export_adapters())
    assert all(torch.equal(after[name], value) for name, value in before.items())
    for weight, a, b in side.names:
        added = ALPHA / RANK * side.adapters[b] @ side.adapters[a]
        # A matrix of 4 rows has few random numbers.
        low, high = (0.15, 0.4) if min(side.base[weight].shape) > 8 else (0.05, 0.8)
        assert low < float(added.norm() / side.base[weight].norm()) < high, weight
    worst_apart, moved = 0.0, []
    has_logprobs = [i for sample, i in zip(actual, indices, strict=True) if sample.recomputed_logprobs is not None]
    with torch.no_grad():
        expected = dict(zip(has_logprobs, side.logprobs(side.weights(), has_logprobs), strict=True))
    for sample, i in zip(actual, indices, strict=True):
        if sample.recomputed_logprobs is not None:
            own = expected[i][sample.loss_mask]
            worst_apart = max(
                worst_apart, float((sample.recomputed_logprobs[sample.loss_mask] - own).norm() / own.norm())
            )
            moved.append(float((own - base[i][sample.loss_mask]).abs().mean()))
    assert not moved or max(moved) > 0.02, moved
    return worst_apart


def update(trainer: Any, case: Case, step: int) -> None:
    """One update from the reference's batch."""
    own = samples()[trainer.dp_rank :: trainer.layout.dp]
    trainer.optimizer.set_step(step)
    trainer.update(Updater(trainer, config_for(case).train, LOSS).pack_batches(own), policy_objective(LOSS))


def read(folder: Path, case: Case, targets: tuple[str, ...]) -> Reference:
    """Return the references that ``write_references`` made."""
    with torch.serialization.safe_globals([Reference]):
        actual: Reference = torch.load(_file(folder, case, targets), weights_only=True)
    return actual


def build(case: Case, targets: tuple[str, ...], platform: Platform) -> Any:
    """A trainer with adapters."""
    lora = {"rank": RANK, "alpha": ALPHA, "target_modules": list(targets)}
    model = hf_reference(case.tied, case.dense, case.shared, case.dense_layers, case.family)
    return build_trainer(case, model, platform, "fp32", lora=lora)


Adapted = tuple[Case, tuple[str, ...]]
"""A layout and the layers that have adapters."""


def save(rank: int, world_size: int, cases: dict[str, Adapted], folder: Path) -> None:
    """Make all updates but the last on each layout, then write a checkpoint."""
    platform = on_this_cpu()
    from megatron.core import parallel_state

    for name, (case, targets) in cases.items():
        trainer = build(case, targets, platform)
        put(trainer, {key: value.float() for key, value in read(folder, case, targets).adapters.items()})
        for step in range(UPDATES - 1):
            update(trainer, case, step)
        trainer.save(folder / name, UPDATES - 1, {}, keep=1)
        dist.barrier()
        parallel_state.destroy_model_parallel()


def load(rank: int, world_size: int, cases: list[tuple[str, Adapted]], folder: Path) -> None:
    """Load each checkpoint on another layout: the last update gives the adapters of the uninterrupted reference."""
    platform = on_this_cpu()
    from megatron.core import parallel_state

    from megatron_dppo.mcore.checkpoint.folder import checkpoints

    for name, (case, targets) in cases:
        trainer = build(case, targets, platform)
        trainer.load(checkpoints(folder / name)[0], same_layout=False)
        update(trainer, case, UPDATES - 1)
        apart = worst(on_cpu(trainer.export_adapters()), read(folder, case, targets).final)
        assert apart < TOLERANCE, f"checkpoint {name} on {case}, {targets}: adapters off by {apart:.1e}"
        dist.barrier()
        parallel_state.destroy_model_parallel()


def on_this_cpu() -> Platform:
    """The platform, with Megatron made fit for it."""
    from megatron_dppo.mcore.shims import apply_shims

    platform = Platform.detect(force_cpu=True)
    apply_shims(platform)
    return platform


def check_frozen(trainer: Any, base: dict[str, Tensor]) -> None:
    """The base has not moved, has no gradient, and the optimizer does not know of it."""
    from megatron_dppo.mcore.optim import optimizer_tensors

    adapters = 0
    for model in trainer.models:
        for name, parameter in model.named_parameters():
            is_adapter = name.startswith("adapters.")
            assert parameter.requires_grad == is_adapter, name
            assert is_adapter or (parameter.grad is None and not hasattr(parameter, "main_grad")), name
            adapters += parameter.numel() * is_adapter
    held = sum(tensor.numel() for tensor in optimizer_tensors(trainer.optimizer))
    assert held <= 3 * adapters, "weights and two moments, or this rank's part of them"
    with trainer.lora.disabled():
        exported = on_cpu(trainer.bridge.export())
    assert all(torch.equal(exported[name], value) for name, value in base.items())


def run(rank: int, world_size: int, cases: list[tuple[Case, tuple[str, ...]]], folder: Path) -> None:
    """Several layouts in one set of processes."""
    platform = on_this_cpu()
    from megatron.core import parallel_state

    for case, targets in cases:
        errors = measure(case, targets, read(folder, case, targets), platform)
        wrong = {name: value for name, value in errors.items() if not value < TOLERANCE}
        assert not wrong, f"{case}, {targets} on rank {rank}: {wrong}"
        dist.barrier()
        parallel_state.destroy_model_parallel()

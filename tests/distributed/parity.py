"""Megatron against transformers on the same weights: log-probs, loss, every gradient, weights after updates."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.config.layout import resolve_layout
from megatron_dppo.config.loss import LossConfig
from megatron_dppo.config.schema import Config
from megatron_dppo.config.train import LayerNoiseConfig
from megatron_dppo.data.training_samples import to_training_sample
from megatron_dppo.hf.folder import DictWeights, build_hf_model, model_shape, stream_model
from megatron_dppo.losses import policy_objective
from megatron_dppo.parallel.platform import Platform
from megatron_dppo.policy.update import Updater
from megatron_dppo.report.clock import Clock
from megatron_dppo.types import TrainingSample
from tests.distributed.families import family_config, in_float64
from tests.reference_run import assert_gradient

STEPS, SAMPLES = 3, 8
UPDATES = int(os.environ.get("MEGATRON_DPPO_TEST_UPDATES", STEPS))
"""Updates that are compared. CI compares two."""
LR, BETAS, EPS, CLIP = 1e-2, (0.9, 0.95), 1e-4, 1.0
TOLERANCE = 1e-5
LOSS = LossConfig(name="pg_is")


@dataclass(frozen=True)
class Case:
    """One layout and the switches under test."""

    parallel: dict[str, Any] = field(default_factory=dict)
    tied: bool = False
    dense: bool = False
    shared: bool = False
    """Qwen2-MoE: a shared expert behind a gate, biases of q, k and v, no norms of q and k"""
    dense_layers: tuple[int, ...] = ()
    """layers without experts, counted from 0"""
    family: str = ""
    """one of ``tests.distributed.families``, instead of those above, against float64"""
    transformer: dict[str, Any] = field(default_factory=dict)
    filtered: bool = False
    """the rollouts were sampled under top-p: most tokens have a sampling mask"""
    micro_batch_tokens: int = 24
    fused_head: bool = True
    provider: str = "builtin"
    lengths: tuple[int, ...] = ()
    """tokens of each sample; empty = ``SAMPLES`` short ones"""


def case_family(case: Case) -> str:
    """Return the name of a case's tiny model."""
    return case.family or ("qwen3" if case.dense else "qwen2_moe" if case.shared else "qwen3_moe")


def hf_config(
    tied: bool, dense: bool = False, shared: bool = False, dense_layers: tuple[int, ...] = (), family: str = ""
) -> Any:
    """A tiny model of the family, or a Qwen3-MoE, Qwen3 or Qwen2-MoE."""
    name = case_family(Case(dense=dense, shared=shared, family=family))
    config = family_config(name, tied=tied)
    if dense_layers:
        config.mlp_only_layers = list(dense_layers)
    return config


def hf_reference(
    tied: bool, dense: bool = False, shared: bool = False, dense_layers: tuple[int, ...] = (), family: str = ""
) -> Any:
    """The transformers model, with norms that are not all one and biases that are not all zero."""
    return randomize(build_hf_model(hf_config(tied, dense, shared, dense_layers, family), torch.float32, seed=0))


def randomize(model: Any) -> Any:
    """Give norms, biases and routers' biases values that matter."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
            elif name.endswith("sinks"):
                parameter.add_(torch.randn(parameter.shape, generator=generator))
            elif name.endswith("A_log"):  # else a state forgets everything after some tokens
                parameter.sub_(4.0)
            elif "conv1d" in name:
                parameter.add_(0.4 * torch.randn(parameter.shape, generator=generator))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.3 * torch.randn(buffer.shape, generator=generator))
    return model


def samples(lengths: Sequence[int] = ()) -> list[TrainingSample]:
    """Ragged sequences with an advantage and made-up rollout log-probabilities near the truth."""
    generator = torch.Generator().manual_seed(2)
    # The last token of a response is a label alone.
    sizes = [(1 + n // 3, n - n // 3) for n in lengths] or [(3 + i % 4, 2 + (5 * i) % 11) for i in range(SAMPLES)]
    result = []
    for i, (prompt_size, response_size) in enumerate(sizes):
        prompt = torch.randint(0, 117, (prompt_size,), generator=generator).tolist()
        response = torch.randint(0, 117, (response_size,), generator=generator).tolist()
        logprobs = (-4.5 + 0.3 * torch.randn(len(response), generator=generator)).tolist()
        result.append(to_training_sample(prompt, response, logprobs, advantage=1.0 - 0.3 * i))
    return result


class HFSide:
    """The same objective in plain transformers, one sequence at a time, divided by the token count.

    ``shared``: each rank computes some of the sequences, and the gradients are summed.
    """

    def __init__(self, case: Case, rounded: bool = False, model: Any = None, shared: bool = False) -> None:
        self.ranks = (dist.get_rank(), dist.get_world_size()) if shared else (0, 1)
        self.model = model or hf_reference(case.tied, case.dense, case.shared, case.dense_layers, case.family)
        if case.family:
            self.model = in_float64(self.model)
        if rounded:
            for parameter in self.model.parameters():
                parameter.data = parameter.data.bfloat16().float()
        self.samples = samples(case.lengths)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0)

    def logprobs(self, sample: TrainingSample) -> Tensor:
        logits = self.model(sample.tokens[None]).logits[0]
        return logits.log_softmax(-1).gather(-1, sample.labels[:, None]).squeeze(-1)

    def backward(self) -> tuple[float, float]:
        """The loss and the mean size of its terms, which have both signs and nearly cancel."""
        self.optimizer.zero_grad()
        tokens = sum(int(s.loss_mask.sum()) for s in self.samples)
        loss, size = torch.zeros(()), 0.0
        rank, count = self.ranks
        for sample in self.samples[rank::count]:
            logprobs = self.logprobs(sample)
            assert sample.rollout_logprobs is not None
            weight = (logprobs.detach() - sample.rollout_logprobs).exp()
            terms = (weight * sample.advantages * logprobs)[sample.loss_mask] / tokens
            loss, size = loss - terms.sum(), size + float(terms.detach().abs().sum())
        loss.backward()
        if count > 1:
            return self.sum_over_ranks(float(loss.detach()), size)
        return float(loss.detach()), size

    def sum_over_ranks(self, loss: float, size: float) -> tuple[float, float]:
        """Sum gradients, loss and size of the terms."""
        for parameter in self.model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        parts = [parameter.grad for parameter in self.model.parameters()]
        together = torch.cat([part.flatten() for part in parts] + [parts[0].new_tensor([loss, size])])
        dist.all_reduce(together)
        *sums, loss_sum, size_sum = together.split([part.numel() for part in parts] + [1, 1])
        for part, total in zip(parts, sums, strict=True):
            part.copy_(total.view_as(part))
        return float(loss_sum), float(size_sum)

    def set_weights(self, weights: dict[str, Tensor]) -> None:
        """Continue from these weights, by on-disk name."""
        with torch.no_grad():
            for name, tensor in stream_model(self.model):
                tensor.copy_(weights[name])

    def step(self) -> float:
        assert_gradient(parameter.grad for parameter in self.model.parameters())
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        return float(norm)

    def gradients(self) -> dict[str, Tensor]:
        holder = build_hf_model(self.model.config, self.model.dtype)
        for target, source in zip(holder.parameters(), self.model.parameters(), strict=True):
            target.data = source.grad.clone() if source.grad is not None else torch.zeros_like(source)
        return dict(stream_model(holder))


def relative_error(value: Tensor, reference: Tensor) -> float:
    """Norm of the difference over the norm of the reference."""
    return float((value - reference).norm() / reference.norm().clamp(min=1e-12))


def worst(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative error of any tensor; both sides must have the same names."""
    assert actual.keys() == expected.keys(), actual.keys() ^ expected.keys()
    return max(relative_error(actual[name], expected[name]) for name in expected)


def config_for(case: Case, dtype: str = "fp32", **sections: dict[str, Any]) -> Config:
    """The configuration of one case, with some keys of some sections changed."""
    values: dict[str, Any] = {
        "run": {"output_dir": "unused", "num_steps": STEPS},
        "model": {
            "path": "unused",
            "provider": case.provider,
            "dtype": dtype,
            "transformer": case.transformer,
            "fused_head": case.fused_head,
        },
        "parallel": case.parallel,
        "data": {"train": "unused"},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 8},
        "train": {"micro_batch_tokens": case.micro_batch_tokens},
        "optimizer": {"lr": LR, "adam_beta1": BETAS[0], "adam_beta2": BETAS[1], "adam_eps": EPS, "clip_grad": CLIP},
    }
    return Config.model_validate(values | {name: values.get(name, {}) | section for name, section in sections.items()})


def build_trainer(
    case: Case,
    model: Any,
    platform: Platform,
    dtype: str,
    noise: LayerNoiseConfig | None = None,
    **sections: dict[str, Any],
) -> Any:
    """A trainer with the weights of a transformers model; joins the process groups of the layout."""
    from megatron_dppo.mcore.model_parts import Placement
    from megatron_dppo.mcore.setup import initialize_megatron
    from megatron_dppo.run.policy_setup import trainer_from_config

    config = config_for(case, dtype, **sections)
    # A folder names it; Megatron Bridge chooses by it.
    model.config.architectures = [type(model).__name__]
    shape, split = model_shape(model.config), config.model.transformer
    layout = resolve_layout(config.parallel, config.batch, dist.get_world_size(), shape, split)
    placement = Placement(
        model.config, layout, initialize_megatron(layout, platform, seed=1, timeout_minutes=3), platform
    )
    return trainer_from_config(config, placement, DictWeights(stream_model(model)), total_steps=STEPS, noise=noise)


def measure(case: Case, platform: Platform, dtype: str = "fp32") -> dict[str, float]:
    """Relative errors of everything about one layout against transformers in fp32 on the CPU.

    ``export``: what comes out against what went in; ``logprobs``; ``loss``; ``gradient``: of the worst parameter;
    ``gradient_direction``: 1 - cosine over all parameters; ``grad_norm``; ``weights``: of the worst after each update.
    The reference continues from Megatron's weights after each update: in such a small model the gradient changes by up
    to 30 times the rounding of the weights.
    """
    hf = HFSide(case, rounded=dtype == "bf16", shared=platform.device.type == "cpu")
    trainer = build_trainer(case, hf.model, platform, dtype)
    exported = on_cpu(trainer.export_weights())
    errors = dict.fromkeys(("loss", "gradient", "gradient_direction", "grad_norm", "weights"), 0.0)
    errors["export"] = worst(exported, dict(stream_model(hf.model)))
    local_samples = hf.samples[trainer.dp_rank :: trainer.layout.dp]
    train = config_for(case, dtype).train
    batches = Updater(trainer, train, LOSS).pack_batches(local_samples)
    errors["logprobs"] = logprob_error(Updater(trainer, train, LossConfig(name="minirl")), hf, local_samples)
    for step in range(UPDATES):
        expected_loss, size = hf.backward()
        trainer.optimizer.set_step(step)
        metrics = trainer.accumulate(batches, policy_objective(LOSS))
        errors["loss"] = max(errors["loss"], abs(metrics["loss"] - expected_loss) / size)
        if step == 0:
            actual, expected = on_cpu(trainer.bridge.export(gradient_reader(trainer))), hf.gradients()
            errors["gradient"] = worst(actual, expected)
            errors["gradient_direction"] = 1 - cosine(actual, expected)
        result, norm = trainer.apply(metrics), hf.step()
        errors["grad_norm"] = max(errors["grad_norm"], abs(result.grad_norm - norm) / norm)
        weights = on_cpu(trainer.export_weights())
        errors["weights"] = max(errors["weights"], worst(weights, dict(stream_model(hf.model))))
        if dtype == "fp32":  # in other dtypes Megatron's own main parameters are exact
            hf.set_weights(weights)
    return errors


def on_cpu(stream: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """A stream of weights as fp32 copies on the CPU."""
    return {name: tensor.detach().float().cpu().clone() for name, tensor in stream}


def cosine(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Cosine of the angle between two sets of tensors."""
    left = torch.cat([actual[name].flatten() for name in expected]).double()
    right = torch.cat([expected[name].flatten() for name in expected]).double()
    return float(left @ right / (left.norm() * right.norm()))


def gradient_reader(trainer: Any) -> Callable[[Tensor], Tensor]:
    """Full local gradients, also where the distributed optimizer keeps only a shard of each on a rank."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    full: dict[int, Tensor] = {}
    for optimizer in trainer.optimizer.megatron.chained_optimizers:
        if not isinstance(optimizer, DistributedOptimizer):
            continue
        members = {id(parameter) for buffer in optimizer.buffers for parameter in buffer.params}
        parameters = [p for model in trainer.models for p in model.parameters() if id(p) in members]
        for parameter in parameters:
            full[id(parameter)] = torch.zeros_like(parameter.main_grad)
        for ranges in optimizer.gbuf_ranges:
            for buckets in ranges.values():
                for bucket in buckets:
                    for parameter, spans in bucket["param_map"].items():
                        own = slice(spans["param"].start, spans["param"].end)
                        full[id(parameter)].view(-1)[own] = parameter.main_grad.view(-1)[own]
        for parameter in parameters:
            dist.all_reduce(full[id(parameter)], group=optimizer.data_parallel_group)

    def read(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, torch.nn.Parameter):  # the bias of a router
            return torch.zeros_like(tensor)
        return full.get(id(tensor), tensor.main_grad)

    return read


def logprob_error(updater: Updater, hf: HFSide, local_samples: list[TrainingSample]) -> float:
    """Relative error of the recomputed log-probabilities in the loss; 0 on ranks that have none."""
    actual = [sample.recomputed_logprobs for sample in updater.add_recomputed(local_samples, Clock())]
    if actual[0] is None:
        return 0.0
    with torch.no_grad():
        expected = [hf.logprobs(sample) for sample in local_samples]
    got = torch.cat(
        [row[sample.loss_mask] for row, sample in zip(actual, local_samples, strict=True) if row is not None]
    )
    want = torch.cat([row[sample.loss_mask] for row, sample in zip(expected, local_samples, strict=True)])
    return relative_error(got, want)


def use_small_chunks(size: int = 4) -> None:
    """Give the short sequences of the tests several chunks of the delta rule, and rows several groups of lengths."""
    from megatron_dppo.mcore import delta_rule
    from megatron_dppo_megatron_cpu import attention as length_buckets

    delta_rule.CHUNK_SIZE = size
    length_buckets.FREE_SLOTS = 0


def run(rank: int, world_size: int, cases: list[Case], report: str | None = None) -> None:
    """Check several layouts in one set of processes.

    Args:
        rank: of this process.
        world_size: number of them.
        cases: the layouts with their models.
        report: a file that gets the largest error of each case, one a line; None = no file.
    """
    from megatron_dppo.mcore.shims import apply_shims

    platform = Platform.detect(force_cpu=True)
    apply_shims(platform)
    from megatron.core import parallel_state

    lines = []
    for case in cases:
        use_small_chunks(64 if case.lengths else 4)
        errors = measure(case, platform)
        assert errors.pop("export") == 0.0, f"{case} on rank {rank}: export differs from what was loaded"
        wrong = {name: error for name, error in errors.items() if not error < TOLERANCE}
        assert not wrong, f"{case} on rank {rank}: {wrong}"
        worst_error = torch.tensor(max(errors.values()))
        dist.all_reduce(worst_error, op=dist.ReduceOp.MAX)
        lines.append(f"{worst_error:.1e}\n")
        parallel_state.destroy_model_parallel()
    if report is not None and rank == 0:
        Path(report).write_text("".join(lines), encoding="utf-8")

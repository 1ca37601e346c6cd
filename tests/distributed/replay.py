"""Router replay on Megatron against transformers in float64, whose routers are forced to the same experts and, with
``weights``, to the same combine weights, the gradients of which pass straight through to the routers' own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.config.train import TrainConfig
from megatron_dppo.hf.folder import build_hf_model, routing_shape, stream_model
from megatron_dppo.losses import policy_objective
from megatron_dppo.parallel.objects import all_gather_objects, is_leader
from megatron_dppo.parallel.platform import Platform
from megatron_dppo.policy.update import Updater
from megatron_dppo.report.clock import Clock
from megatron_dppo.types import TrainingSample, with_weights
from megatron_dppo_engines.route_checks import compact_routes, is_missing, missing_rows
from tests.distributed.families import combined, in_float64, router_scores
from tests.distributed.parity import (
    LOSS,
    Case,
    build_trainer,
    config_for,
    gradient_reader,
    hf_reference,
    on_cpu,
    samples,
)
from tests.reference_run import assert_gradient

TOLERANCE = 2e-5


@dataclass
class Reference:
    """Expected results with the routes of ``samples``."""

    samples: list[TrainingSample]
    loss: float
    gradients: dict[str, Tensor] = field(default_factory=dict)
    missing: float = 0.0
    """share of tokens times layers with experts whose routes are missing"""
    live: float = 0.0
    """share of the given rows where the live router would choose other experts, replay before it"""
    unreplayed: float = 0.0
    """the same without replay anywhere"""
    weight_diff: float = 0.0
    """mean |given - live| of the weights of the given experts, replay before it"""
    unreplayed_weight_diff: float = 0.0
    """the same without replay anywhere, where an expert that was not chosen has the weight 0"""


def model_of(case: Case) -> Any:
    """The model that both sides start from."""
    return hf_reference(case.tied, case.dense, case.shared, case.dense_layers, case.family)


def foreign_routes(sample: TrainingSample, model: Any, seed: int) -> Tensor:
    """Random experts in random order; every eleventh row missing, and all layers of one token."""
    shape = routing_shape(model.config)
    assert shape is not None
    generator = torch.Generator().manual_seed(seed)
    size = (sample.num_tokens, shape.num_layers)
    values = torch.rand(*size, shape.num_experts, generator=generator).argsort(-1)[..., : shape.topk]
    values[torch.arange(size[0] * size[1]).view(size) % 11 == seed % 11] = -1
    values[seed % sample.num_tokens] = -1
    return compact_routes(values, shape, tokens=sample.num_tokens, request=f"sample {seed}")


def foreign_weights(sample: TrainingSample, model: Any, seed: int) -> Tensor:
    """Random weights ``[T, L, k]`` fp32 that add up to what those of the model do."""
    generator = torch.Generator().manual_seed(100 + seed)
    size = (sample.num_tokens, model.config.num_hidden_layers, model.config.num_experts_per_tok)
    weights = torch.randn(size, generator=generator).softmax(-1) * getattr(model.config, "routed_scaling_factor", 1.0)
    adds_up = getattr(model.config, "norm_topk_prob", True)
    return weights if adds_up else weights * torch.rand(size[:2], generator=generator)[..., None]


class ForcedRouters:
    """Puts given experts into the routers of a transformers model, where they are not missing, and given weights."""

    def __init__(self, model: Any) -> None:
        self._routes: Tensor | None = None
        self._weights: Tensor | None = None
        self.live: dict[int, Tensor] = {}
        """by layer, ``[tokens, k]`` that each router would have chosen"""
        self.live_weights: dict[int, Tensor] = {}
        """by layer, ``[tokens, experts]`` of its own, of the experts that were used"""
        for i, layer in enumerate(model.model.layers):
            router = getattr(layer.mlp, "router", None) or getattr(layer.mlp, "gate", None)
            if router is not None:
                router.forward = lambda x, *bias, m=router, i=i: self._route(m, i, x, *bias)

    @contextmanager
    def using(self, routes: Tensor | None, weights: Tensor | None = None) -> Iterator[None]:
        """These experts inside, with these weights; None = the live ones."""
        self._routes, self._weights = routes, weights
        yield
        self._routes = self._weights = None

    def _route(self, module: Any, layer: int, x: Tensor, *bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = torch.nn.functional.linear(
            x.reshape(-1, module.hidden_dim), module.weight, getattr(module, "bias", None)
        )
        weights, order = router_scores(module, logits, *bias)
        chosen = self.live[layer] = order.topk(module.top_k, dim=-1).indices
        if self._routes is not None:
            given = self._routes[:, layer]
            chosen = torch.where(is_missing(self._routes)[:, [layer]], chosen, given.long())
        result = combined(module, weights, chosen)
        self.live_weights[layer] = torch.zeros_like(weights).scatter(1, chosen, result.detach())
        if self._routes is not None and self._weights is not None:
            straight = result + (self._weights[:, layer].to(result.dtype) - result).detach()
            result = torch.where(is_missing(self._routes)[:, [layer]], result, straight)
        return logits, result, chosen

    def weights_apart(self, routes: Tensor, weights: Tensor) -> float:
        """The sum of |given - live| over the weights of the given experts, of the latest pass."""
        known, total = ~is_missing(routes), 0.0
        for layer, live in self.live_weights.items():
            rows = known[:, layer]
            own = live[rows].gather(1, routes[rows, layer].long())
            total += float((own - weights[rows, layer]).abs().sum())
        return total

    def differing(self, routes: Tensor) -> tuple[int, int]:
        """(given rows where the latest live choice is another set, given rows)."""
        known = ~is_missing(routes)
        different = 0
        for layer, chosen in self.live.items():
            pairs = zip(chosen.tolist(), routes[:, layer].tolist(), known[:, layer].tolist(), strict=True)
            different += sum(is_known and set(a) != set(b) for a, b, is_known in pairs)
        return different, int(known.sum())


def make_reference(case: Case, *, weights: bool) -> Reference:
    """The loss ``-sum(w A log pi) / tokens`` of all samples, in float64, one sequence at a time."""
    model = in_float64(model_of(case))
    forced = ForcedRouters(model)
    batch = [replace(s, routed_experts=foreign_routes(s, model, i)) for i, s in enumerate(samples())]
    tokens, num_layers = sum(int(s.loss_mask.sum()) for s in batch), len(forced.live)
    total, result, free, apart = torch.zeros((), dtype=torch.float64), [0, 0], [0, 0], [0.0, 0.0]
    for i, sample in enumerate(batch):
        routes, given = sample.routed_experts, foreign_weights(sample, model, i)
        assert routes is not None and sample.rollout_logprobs is not None
        with torch.no_grad():
            model(sample.tokens[None])
        free = [a + b for a, b in zip(free, forced.differing(routes), strict=True)]
        apart[0] += forced.weights_apart(routes, given)
        with forced.using(routes, given if weights else None):
            logits = model(sample.tokens[None]).logits[0]
        result = [a + b for a, b in zip(result, forced.differing(routes), strict=True)]
        apart[1] += forced.weights_apart(routes, given)
        if weights:
            batch[i] = replace(sample, routed_experts=with_weights(routes, given))
        logprobs = logits.log_softmax(-1).gather(1, sample.labels[:, None])[:, 0]
        weight = (logprobs.detach() - sample.rollout_logprobs).exp()
        total = total - (weight * sample.advantages * logprobs)[sample.loss_mask].sum() / tokens
    total.backward()
    assert_gradient(parameter.grad for parameter in model.parameters())
    num_layers = len(forced.live)
    rows = sum(s.num_tokens for s in batch) * num_layers
    holder = build_hf_model(model.config, torch.float64)
    for target, source in zip(holder.parameters(), model.parameters(), strict=True):
        target.data = torch.zeros_like(source) if source.grad is None else source.grad.clone()
    return Reference(
        samples=batch,
        loss=float(total.detach()),
        gradients={name: value.clone() for name, value in stream_model(holder)},
        missing=1 - result[1] / rows,
        live=result[0] / result[1],
        unreplayed=free[0] / free[1],
        weight_diff=apart[1] / (result[1] * model.config.num_experts_per_tok),
        unreplayed_weight_diff=apart[0] / (result[1] * model.config.num_experts_per_tok),
    )


def _file(folder: Path, case: Case, weights: bool) -> Path:
    model = f"tied={case.tied} shared={case.shared} dense_layers={case.dense_layers} family={case.family}"
    return folder / f"{model} weights={weights}.pt"


def write_references(folder: Path, cases: list[Case], *, weights: bool) -> None:
    """Write the references of the cases' models for the workers, where the folder lacks them."""
    for case in cases:
        path = _file(folder, case, weights)
        if not path.exists():
            torch.save(make_reference(case, weights=weights), path)


def read_reference(folder: Path, case: Case, *, weights: bool = False) -> Reference:
    """Return the references that ``write_references`` made for the model of ``case``."""
    with torch.serialization.safe_globals([Reference, TrainingSample]):
        result: Reference = torch.load(_file(folder, case, weights), weights_only=True)
    return result


class Side:
    """The trainer of one layout, and what it computes of some samples."""

    def __init__(self, case: Case, platform: Platform, mode: str, *, weights: bool) -> None:
        replay = {"router_replay": mode, "router_replay_weights": weights}
        self.trainer = build_trainer(case, model_of(case), platform, "fp32", train=replay)
        self.weights = weights
        self._train = config_for(case).train

    def mine(self, all_samples: list[TrainingSample]) -> list[TrainingSample]:
        """This rank's share."""
        return all_samples[self.trainer.dp_rank :: self.trainer.layout.dp]

    def updater(self, **train: Any) -> Updater:
        """Return an updater of the loss under test."""
        return Updater(self.trainer, TrainConfig(**(self._train.model_dump() | train)), LOSS)

    def gradients(self, mine: list[TrainingSample], **train: Any) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Full gradients by Hugging Face name, and the metrics."""
        batches = self.updater(**train).pack_batches(mine)
        assert len(batches) * self.trainer.layout.dp >= 4
        metrics = self.trainer.accumulate(batches, policy_objective(LOSS))
        return on_cpu(self.trainer.bridge.export(gradient_reader(self.trainer))), metrics


def check_differences(side: Side, reference: Reference, where: str) -> None:
    """Token by token: a route is known where the batch has one, and the shares are those of the metric."""
    trainer = side.trainer
    batches = side.updater().pack_batches(side.mine(reference.samples))
    metrics = trainer.accumulate(batches, policy_objective(LOSS), (), [])
    differences = trainer.route_differences(batches)
    assert len(differences) == len(batches)
    total = torch.zeros(2, dtype=torch.int64)
    for batch, found in zip(batches, differences, strict=True):
        assert batch.routed_experts is not None
        local = list(trainer.replayed_layers or range(trainer.routing_shape.num_layers))
        assert torch.equal(found[:, local, 0], ~is_missing(batch.routed_experts[:, local])), where
        assert not bool((found[..., 1] & ~found[..., 0]).any()), where
        total += found.sum((0, 1))
    groups = trainer.groups
    counts = is_leader(groups.tp) and is_leader(groups.cp)
    parts = all_gather_objects(total if counts else total * 0, groups.world)
    known, differ = sum(parts).tolist()
    assert differ / known == metrics["router_live_disagreement"], where


def check_foreign(side: Side, reference: Reference, where: str) -> None:
    """Another model's routing, with its weights or without: gradients of the reference, nothing differs afterwards, all
    rows counted."""
    result, metrics = side.gradients(side.mine(reference.samples))
    expected = reference.gradients
    assert result.keys() == expected.keys()
    typical = sum(float(g.norm()) for g in expected.values()) / len(expected)
    error = max(float((result[n] - g).norm() / max(float(g.norm()), 0.01 * typical)) for n, g in expected.items())
    assert error < TOLERANCE, f"{where}: gradient off by {error:.1e}"
    assert abs(metrics["loss"] - reference.loss) < TOLERANCE, where
    routers = [float(g.norm()) for n, g in result.items() if n.endswith((".gate.weight", ".router.weight"))]
    assert routers and min(routers) > 0.01 * typical, where
    assert metrics["router_disagreement"] == 0.0, where
    assert metrics["router_live_disagreement"] == reference.live > 0.5, (where, metrics, reference.live)
    assert abs(metrics["router_missing"] - reference.missing) < 1e-12 and 0.1 < reference.missing < 0.4, where
    _check_weight_diff(metrics, reference.weight_diff if side.weights else None, where)


def _check_weight_diff(metrics: dict[str, float], expected: float | None, where: str) -> None:
    if expected is None:
        assert "router_weight_diff" not in metrics, where
    else:
        assert abs(metrics["router_weight_diff"] - expected) < 1e-6 < 0.01 < expected, (where, metrics, expected)


def check_own(side: Side, where: str) -> None:
    """The trainer's own routing, and no known routing at all: bit for bit what it computes without replay."""
    # In other micro-batches the same token has weights that are rounded otherwise; those of the recording stay.
    plain, train = side.mine(samples()), {"balance_ranks": not side.weights}
    without, metrics = side.gradients(plain, **train)
    assert not [name for name in metrics if name.startswith("router_")], where
    recorded = side.updater(router_replay="recorded", epochs=2).add_recomputed(plain, Clock())
    shape = side.trainer.routing_shape
    nothing = [replace(s, routed_experts=missing_rows(s.num_tokens, shape)) for s in plain]
    for name, with_routes, missing in (("recorded", recorded, 0.0), ("missing", nothing, 1.0)):
        replayed, metrics = side.gradients(with_routes, **train)
        different = [n for n, gradient in without.items() if not torch.equal(gradient, replayed[n])]
        assert not different, f"{where}, {name}: {len(different)} gradients differ, {different[:3]}"
        assert metrics["router_missing"] == missing, (where, name, metrics)
        own = None if missing or not side.weights else 0.0
        assert metrics.get("router_weight_diff") == own, (where, name, metrics)
        # Of routes that are all missing there is no share that disagrees.
        shares = {key: value for key, value in metrics.items() if key.endswith("_disagreement")}
        names = ("router_disagreement", "router_live_disagreement")
        assert shares == ({} if missing else dict.fromkeys(names, 0.0)), (where, name, metrics)


def check_compared(side: Side, reference: Reference, where: str) -> None:
    """Routes that are only compared: bit for bit the computation without them, and the reference's disagreement."""
    without, _ = side.gradients(side.mine(samples()))
    result, metrics = side.gradients(side.mine(reference.samples))
    assert all(torch.equal(gradient, result[name]) for name, gradient in without.items()), where
    assert metrics["router_disagreement"] == metrics["router_live_disagreement"] == reference.unreplayed, where
    _check_weight_diff(metrics, reference.unreplayed_weight_diff if side.weights else None, where)


def run(rank: int, world_size: int, cases: list[Case], references: Path, mode: str, weights: bool) -> None:
    """Every check of ``mode`` on every layout, with weights or without."""
    from megatron_dppo.mcore.shims import apply_shims

    platform = Platform.detect(force_cpu=True)
    apply_shims(platform)
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.router_replay import RouterReplay

    for case in cases:
        reference, where = read_reference(references, case, weights=weights), f"{case}, rank {rank}"
        side = Side(case, platform, mode, weights=weights)
        assert not RouterReplay.global_router_replay_instances, "nothing stays in Megatron's global list"
        if mode == "compare":
            check_compared(side, reference, where)
        else:
            check_foreign(side, reference, where)
            check_differences(side, reference, where)
            check_own(side, where)
            # Nothing of the trainer's routes stays: one layout of each list shows it, ``make test-matrix`` all.
            if case is cases[0] or os.environ.get("EVERYTHING"):
                check_foreign(side, reference, f"{where}, again")
        dist.barrier()
        parallel_state.destroy_model_parallel()

"""The load-balancing loss of the routers has the same gradient for every layout, and that of its formula in float64.

With p the router's softmax over E experts, c how often an expert is among the k chosen, T the tokens of a micro-batch:

    aux = coefficient * E / (k T^2) * sum over experts of c_e * sum over tokens of p_te

weighted by T and divided by the tokens in the loss, as Megatron does with ``calculate_per_token_loss``. The z-loss
is its coefficient times the mean of ``logsumexp(logits)^2`` over tokens, weighted alike. The padding that a layout adds
to rows is no token: it must not enter the two losses, nor the counts by which the biases of sigmoid routers move.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.data.training_samples import pack, to_training_sample
from megatron_dppo.hf.folder import build_hf_model, stream_model
from megatron_dppo.losses import policy_objective
from megatron_dppo.parallel.platform import Platform
from megatron_dppo.types import TrainingSample
from tests.distributed.families import in_float64 as family_in_float64
from tests.distributed.objective import in_float64
from tests.distributed.parity import LOSS, Case, build_trainer, gradient_reader, hf_reference, on_cpu, worst
from tests.distributed.spawn import run_distributed
from tests.reference_run import assert_gradient

pytestmark = pytest.mark.distributed

COEFFICIENT, Z_COEFFICIENT, MICRO_BATCHES = 0.5, 0.02, 4
AUX = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": COEFFICIENT}
LENGTHS = {
    "even": (4, 8, 12, 4, 8, 12, 4, 8),
    "padded": (9, 12, 7, 10, 13, 6, 11, 8),
    "short": (1, 2, 1, 3, 5, 1, 2, 2),
}
"""Tokens of each sample: no layout pads the first; of the last, context parallelism makes mostly padding."""
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
MOE_RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
TP = {"tensor_model_parallel_size": 2}
CP = {"context_parallel_size": 2}
BalanceCase = tuple[dict[str, Any], str, dict[str, Any]]
"""A layout, a key of ``LENGTHS``, and further keys of Megatron's configuration."""


def samples(lengths: str) -> list[TrainingSample]:
    """Two for each micro-batch."""
    generator = torch.Generator().manual_seed(4)
    result = []
    for i, length in enumerate(LENGTHS[lengths]):
        ids = torch.randint(0, 117, (length + 1,), generator=generator).tolist()
        logprobs = (-4.5 + 0.3 * torch.randn(length, generator=generator)).tolist()
        result.append(to_training_sample(ids[:1], ids[1:], logprobs, 1.0 - 0.3 * i))
    return result


def reference(lengths: str, z_coefficient: float) -> tuple[dict[str, Tensor], float]:
    """Gradients of policy loss, load-balancing loss and z-loss; the mean of the second without its coefficient."""
    model = in_float64(hf_reference(tied=False))
    logits: list[Tensor] = []
    routers = [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]
    for router in routers:
        router.register_forward_hook(lambda module, args, output: logits.append(output[0]))
    num_tokens = sum(int(sample.loss_mask.sum()) for sample in samples(lengths))
    loss, balance = torch.zeros((), dtype=torch.float64), 0.0
    for start in range(0, 2 * MICRO_BATCHES, 2):
        logits.clear()
        for sample in samples(lengths)[start : start + 2]:
            log_p = model(sample.tokens[None]).logits[0].log_softmax(-1)
            log_p = log_p.gather(1, sample.labels[:, None])[:, 0][sample.loss_mask]
            assert sample.rollout_logprobs is not None
            weight = (log_p.detach() - sample.rollout_logprobs[sample.loss_mask]).exp()
            loss = loss - (weight * sample.advantages[sample.loss_mask] * log_p).sum()
        for layer in range(len(routers)):
            rows = torch.cat(logits[layer :: len(routers)])
            probabilities, count = rows.softmax(-1), rows.shape[0]
            chosen = torch.zeros_like(rows).scatter(1, rows.topk(2, dim=-1).indices, 1.0).sum(0)
            aux = rows.shape[1] / (2 * count**2) * (chosen * probabilities.sum(0)).sum()
            loss = loss + COEFFICIENT * aux * count + z_coefficient * rows.logsumexp(-1).square().sum()
            balance += float(aux.detach()) / (MICRO_BATCHES * len(routers))
    (loss / num_tokens).backward()
    assert_gradient(parameter.grad for parameter in model.parameters())
    holder = build_hf_model(model.config, torch.float64)
    for target, source in zip(holder.parameters(), model.parameters(), strict=True):
        target.data = torch.zeros_like(source) if source.grad is None else source.grad.clone()
    return {name: value.float() for name, value in stream_model(holder)}, balance


def write_references(folder: Path, cases: list[BalanceCase]) -> None:
    """Write the references of the cases for the workers, where the folder lacks them."""
    for _, lengths, keys in cases:
        file = _file(folder, lengths, keys)
        if not file.exists():
            torch.save(reference(lengths, keys.get("moe_z_loss_coeff", 0.0)), file)


def _file(folder: Path, lengths: str, keys: dict[str, Any]) -> Path:
    return folder / f"{lengths} {keys.get('moe_z_loss_coeff', 0.0)}.pt"


def run(rank: int, world_size: int, cases: list[BalanceCase], references: Path) -> None:
    """Gradient and metric of each layout, lengths, and further keys of Megatron's configuration."""
    from megatron_dppo.mcore.shims import apply_shims

    platform = Platform.detect(force_cpu=True)
    apply_shims(platform)
    from megatron.core import parallel_state

    for layout, lengths, keys in cases:
        gradients, balance = torch.load(_file(references, lengths, keys), weights_only=True)
        trainer = build_trainer(Case(layout, transformer=AUX | keys), hf_reference(tied=False), platform, "fp32")
        pairs = [samples(lengths)[i : i + 2] for i in range(0, 2 * MICRO_BATCHES, 2)]
        batches = [pack(pair, trainer.row_shape) for pair in pairs[trainer.dp_rank :: trainer.layout.dp]]
        if lengths == "padded":  # a rank whose peers have more samples runs rows of padding alone
            batches.append(pack([], trainer.row_shape, pairs[0][0]))
        metrics = trainer.accumulate(batches, policy_objective(LOSS))
        error = worst(on_cpu(trainer.bridge.export(gradient_reader(trainer))), gradients)
        assert error < 2e-5, f"{layout} {lengths} {keys}: gradient off by {error:.1e}"
        assert abs(metrics["load_balancing_loss"] - balance) < 1e-5, f"{layout}: {metrics['load_balancing_loss']}"
        dist.barrier()
        parallel_state.destroy_model_parallel()


def biases(rank: int, world_size: int, layouts: list[dict[str, Any]]) -> None:
    """The biases of sigmoid routers after one update, of the counts of a model in float64 without padding."""
    from megatron_dppo.mcore.shims import apply_shims

    platform = Platform.detect(force_cpu=True)
    apply_shims(platform)
    from megatron.core import parallel_state

    rate = 0.01
    model = hf_reference(False, family="glm4_moe")
    exact = family_in_float64(model)
    chosen: dict[int, list[Tensor]] = {}
    routers = [m for m in exact.modules() if type(m).__name__.endswith("TopkRouter")]
    for number, router in enumerate(routers):
        router.register_forward_hook(lambda _, args, output, i=number: chosen.setdefault(i, []).append(output[2]))
    for sample in samples("short"):
        exact(sample.tokens[None])
    expected = []
    for number, router in enumerate(routers):
        counts = torch.cat([indices.flatten() for indices in chosen[number]]).bincount(minlength=8).double()
        expected.append(router.e_score_correction_bias.double() + rate * (counts.mean() - counts).sign())
    for layout in layouts:
        case = Case(layout, family="glm4_moe", transformer={"moe_router_bias_update_rate": rate})
        trainer = build_trainer(case, model, platform, "fp32")
        pairs = [samples("short")[i : i + 2] for i in range(0, 2 * MICRO_BATCHES, 2)]
        batches = [pack(pair, trainer.row_shape) for pair in pairs[trainer.dp_rank :: trainer.layout.dp]]
        trainer.apply(trainer.accumulate(batches, policy_objective(LOSS)))
        exported = trainer.export_weights()
        after = [weight.clone() for name, weight in exported if name.endswith("e_score_correction_bias")]
        assert len(after) == len(expected) == 3
        for bias, right in zip(after, expected, strict=True):
            assert float((bias.double().cpu() - right).abs().max()) < 1e-6, layout
        dist.barrier()
        parallel_state.destroy_model_parallel()


PP, EP = {"pipeline_model_parallel_size": 2}, {"expert_model_parallel_size": 2}
Z = {"moe_z_loss_coeff": Z_COEFFICIENT}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the references, which tests share."""
    return tmp_path_factory.mktemp("references")


def check(processes: int, cases: list[BalanceCase], references: Path) -> None:
    """Compare the cases with their references, which are computed once."""
    write_references(references, cases)
    run_distributed(run, processes, cases, references)


def test_one_and_two_processes(references: Path) -> None:
    check(1, [({}, "even", {}), ({}, "padded", Z)], references)
    plain: list[BalanceCase] = [(layout, "even", {}) for layout in (TP, CP, {}, EP, PP)]
    padded = [
        (TP, "padded", Z),
        (TP, "short", MOE_RECOMPUTED),
        (CP, "padded", RECOMPUTED),
        (CP, "short", Z),
        ({}, "padded", {}),
        (EP, "padded", {}),
    ]
    check(2, plain + padded, references)


def test_four_processes(references: Path) -> None:
    cases = [({**TP, **CP}, "padded", Z), ({**TP, **PP}, "padded", MOE_RECOMPUTED), ({**CP, **PP}, "short", RECOMPUTED)]
    check(4, [*cases, ({**TP, **PP}, "even", {})], references)


def test_biases_of_routers_move_by_the_tokens_alone() -> None:
    run_distributed(biases, 1, [{}])
    run_distributed(biases, 2, [TP, CP, PP, EP])
    run_distributed(biases, 4, [{**TP, **CP}, {**TP, **PP}])

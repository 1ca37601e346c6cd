"""Sums by server on layouts that shard vocabulary, sequence, layers and samples, against transformers."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron_dppo.parallel.platform import Platform
from megatron_dppo.policy.server_sums import ServerSums, TokenSource
from megatron_dppo.policy.update import Updater
from megatron_dppo.report.clock import Clock
from megatron_dppo.types import TrainingSample, VersionSpan
from tests.distributed.parity import LOSS, Case, HFSide, build_trainer, config_for, samples
from tests.distributed.spawn import run_distributed

LAYOUTS = (
    {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    {"context_parallel_size": 2},
    {"pipeline_model_parallel_size": 2},
    {"expert_model_parallel_size": 2},
)


def sampled_by_servers() -> list[TrainingSample]:
    """The samples of ``parity``: even ones of one server, odd ones half of each, the second half with old weights."""
    result = []
    for i, sample in enumerate(samples()):
        end = sample.num_tokens
        start = end - int(sample.loss_mask.sum())
        middle = (start + end) // 2
        spans = (VersionSpan(0, start, end, "http://a"),)
        if i % 2:
            spans = (VersionSpan(-1, start, middle, "http://a"), VersionSpan(0, middle, end, "http://b"))
        result.append(replace(sample, sources=spans))
    return result


def expected_sums(hf: HFSide) -> dict[TokenSource, dict[str, float]]:
    """Every sum from full logits, one token at a time."""
    totals: dict[TokenSource, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for sample in sampled_by_servers():
        with torch.no_grad():
            table = hf.model(sample.tokens[None]).logits[0].double().log_softmax(-1)
        assert sample.rollout_logprobs is not None
        for span in sample.sources:
            sums = totals[TokenSource(span.server, span.policy_version < 0)]
            for t in range(span.start, span.end):
                log_pi, log_mu = float(table[t, sample.labels[t]]), float(sample.rollout_logprobs[t])
                entropy = -float((table[t].exp() * table[t]).sum())
                ratio = math.exp(log_pi - log_mu)
                q, d = abs(math.exp(log_pi) - math.exp(log_mu)), min(max(log_pi - log_mu, -1.0), 1.0)
                x = -(log_pi - d) - entropy
                values = {
                    "tokens": 1.0,
                    "prob_diff": q,
                    "prob_diff_square": q * q,
                    "log_diff": d,
                    "abs_log_diff": abs(d),
                    "log_diff_square": d * d,
                    "divergence": q,
                    "surprise": x,
                    "surprise_square": x * x,
                    "entropy": entropy,
                    "ratio_small": math.log1p(0.01 * (ratio - 1)),
                    "ratio_medium": math.log1p(0.1 * (ratio - 1)),
                    "ratio_large": math.log1p(0.5 * (ratio - 1)),
                }
                for name, value in values.items():
                    sums[name] += value
            sums["responses"] += float(span.end > span.start)
    return totals


def _check_layouts(rank: int, world_size: int) -> None:
    from megatron_dppo.mcore.shims import apply_shims

    platform = Platform.detect(force_cpu=True)
    apply_shims(platform)
    from megatron.core import parallel_state

    expected = expected_sums(HFSide(Case()))
    for layout in LAYOUTS:
        case = Case(layout)
        trainer = build_trainer(case, HFSide(case).model, platform, "fp32")
        seen: list[dict[TokenSource, ServerSums]] = []
        local = sampled_by_servers()[trainer.dp_rank :: trainer.layout.dp]
        updater = Updater(trainer, config_for(case).train, LOSS)
        trainer.optimizer.set_step(0)
        list(updater.run(local, 0, Clock(), lambda _, sums, seen=seen: seen.append(sums) or {}))
        (sums,) = seen
        assert sums.keys() == expected.keys() and len(sums) == 3
        for source, each in expected.items():
            for name, value in each.items():
                found = getattr(sums[source], name)
                assert found == pytest.approx(value, rel=2e-5, abs=2e-5), (layout, source, name)
        dist.barrier()
        parallel_state.destroy_model_parallel()


def test_the_sums_of_each_server_are_those_of_the_whole_model() -> None:
    run_distributed(_check_layouts, 2)

"""A real SGLang server under top-p, top-k and min-p: what it says it kept, and the log-probabilities over that."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_dppo.errors import ServerError
from megatron_dppo_engines.server import Generation, InferenceServer
from megatron_dppo_engines.servers.contract import Contract, check_generation
from tests.distributed.sampling_masks import keep
from tests.e2e.runs import step_records, train
from tests.engines.calls import SHORT, ask, call
from tests.engines.probes import expectation, run
from tests.engines.runs import arguments
from tests.engines.servers import Engine
from tests.engines.tiny import END, ROUTING, VOCAB, Reference, difference

pytestmark = pytest.mark.parametrize("shared_sglang", ["0.5.23"], indirect=True)

RULES = {"top_p": 0.8, "top_k": 60, "min_p": 0.01}
TEMPERATURE = 0.2
"""A model of random weights is so flat that only a low one makes the filters differ from token to token."""


def test_sampling_masks_and_log_probabilities_equal_those_of_transformers(sglang: Engine, old_model: Reference) -> None:
    requests = [ask(SHORT[i:], 40, temperature=TEMPERATURE, topk=4, routing=ROUTING) for i in range(6)]
    requests = [replace(r, params=replace(r.params, **RULES, return_sampling_mask=True)) for r in requests]  # type: ignore[arg-type]

    async def use(server: InferenceServer) -> list[Generation]:
        return await asyncio.gather(*(server.generate(request) for request in requests))

    sizes, contract = [], Contract(vocab_size=VOCAB, end_tokens=(END,))
    for request, actual in zip(requests, call(sglang, use), strict=True):
        check_generation(actual, request, contract, sglang.url)
        assert (
            actual.sampling_mask is not None and actual.topk_token_ids is not None and actual.topk_logprobs is not None
        )
        tokens = actual.token_ids.tolist()
        distributions = old_model.distributions(request.token_ids, tokens, TEMPERATURE)
        over = keep(distributions, actual.sampling_mask)
        assert difference(actual.logprobs, over.gather(1, torch.tensor(tokens)[:, None])[:, 0]) < 1e-5
        used = actual.topk_token_ids >= 0
        expected = over.gather(1, actual.topk_token_ids.clamp(min=0).long())
        assert difference(torch.where(used, actual.topk_logprobs, 0.0), torch.where(used, expected, 0.0)) < 2e-5
        for row, ids in zip(
            distributions, actual.sampling_mask.ids.split(actual.sampling_mask.counts.tolist()), strict=True
        ):
            if row.isnan().any():
                break
            sizes.append(len(ids))
            probabilities, order = row.exp().sort(descending=True)
            assert sorted(ids.tolist()) == sorted(order[: len(ids)].tolist()), "the most probable ones"
            assert len(ids) <= 60 and float(probabilities[len(ids) - 1]) >= 0.0099 * float(probabilities[0])
            assert float(probabilities[: len(ids) - 1].sum()) <= 0.8 + 1e-5, "the last one was needed"
    assert max(sizes) > 4 and min(sizes) == 1 and len(set(sizes)) > 5


def test_the_probe_passes_with_filters_and_detects_wrong_weights(
    sglang: Engine, old_model: Reference, new_model: Reference
) -> None:
    expected = expectation(routing=ROUTING, temperature=TEMPERATURE, **RULES)
    result = run(sglang, expected, old_model)
    # The temperature divides the rounding of fp32: a rare token was once off by 1.1e-5.
    assert result.logprobs.largest < 2e-5 and result.topk is not None and result.topk.largest < 1e-4
    with pytest.raises(ServerError, match="wrong weights"):
        run(sglang, expected, new_model)


def test_a_run_trains_with_sampling_masks(sglang: Engine, old_model: Reference, tmp_path: Path) -> None:
    """Probe, contract, processes that read answers, stream and head of a whole run, with a Top-K loss."""
    more = {f"rollout__{name}": value for name, value in RULES.items()} | {"rollout__temperature": 0.5}
    settings = arguments(
        [sglang],
        tmp_path / "run",
        **more,
        run__num_steps=2,
        model__path=old_model.folder,
        rollout__prompts_per_step=4,
        train__mini_batches=1,
        loss__name="dppo_topk_kl",
        loss__topk=8,
        eval__every=100,
        eval__max_prompts=1,
        parallel__expert_model_parallel_size=1,
    )
    result = train(settings)
    assert result.returncode == 0, result.stdout + result.stderr
    steps = step_records(tmp_path / "run")
    assert len(steps) == 2
    for step in steps:
        assert abs(step["train/ratio"] - 1) < 1e-5 and step["train/divergence_max"] < 1e-4
        assert abs(step["train/topk_other"] - step["train/topk_other_rollout"]) < 1e-5
        assert 1 < step["rollout/allowed_ids"] <= 60

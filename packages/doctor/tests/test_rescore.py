"""Scoring given tokens with a transformers model: against one in float64 with routers of the tests' own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_dppo.data.training_samples import to_training_sample
from megatron_dppo.engines.local.engine import LocalEngine
from megatron_dppo.hf.folder import routing_shape, stream_model
from megatron_dppo.types import Prompt, SamplingParams, TrainingSample, with_weights
from megatron_dppo_doctor.diagnose.rescore import ForcedRoutes, rescore, rescore_by_engine, with_filter
from megatron_dppo_lab.perturbation import Perturbation
from tests.distributed.families import in_float64
from tests.distributed.parity import Case, hf_reference, samples
from tests.distributed.replay import ForcedRouters, foreign_routes, foreign_weights
from tests.silent_tokenizer import SilentTokenizer

TOKENIZER = SilentTokenizer()
TEMPERATURE = 0.7


CASES = {
    "plain": Case(),
    "shared": Case(shared=True),
    "mixed": Case(dense_layers=(2,)),
    "glm": Case(family="glm4_moe"),
    "deepseek": Case(family="deepseek_v3"),
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_given_experts_and_weights_are_used_and_what_is_missing_stays_live(case: Case, weighted: bool) -> None:
    model = hf_reference(case.tied, case.dense, case.shared, case.dense_layers, case.family)
    shape = routing_shape(model.config, weights=weighted)
    assert shape is not None
    routed = []
    for i, sample in enumerate(samples()[:6]):
        routes = foreign_routes(sample, model, i)
        routes = with_weights(routes, foreign_weights(sample, model, i)) if weighted else routes
        routed.append(replace(sample, routed_experts=routes))
    actual = rescore(model, routed, temperature=TEMPERATURE, forced=ForcedRoutes(model, shape))
    exact = in_float64(hf_reference(case.tied, case.dense, case.shared, case.dense_layers, case.family))
    routers = ForcedRouters(exact)
    for i, (sample, row) in enumerate(zip(routed, actual, strict=True)):
        weights = foreign_weights(sample, model, i) if weighted else None
        with torch.no_grad(), routers.using(foreign_routes(sample, model, i), weights):
            logits = exact(sample.tokens[None]).logits[0] / TEMPERATURE
        expected = logits.log_softmax(-1).gather(1, sample.labels[:, None])[:, 0]
        assert (row - expected).abs().max() < 1e-4


def of_engine(engine: LocalEngine, **settings: object) -> list[TrainingSample]:
    prompts = [Prompt(prompt_id="", text="", token_ids=(5 + i, 9, 30 + i)[: 1 + i % 3], label="") for i in range(6)]
    params = SamplingParams(
        max_new_tokens=9,
        temperature=TEMPERATURE,
        seed=2,
        routed_experts=True,
        router_weights=True,
        **settings,  # type: ignore[arg-type]
    )
    return [
        to_training_sample(p.token_ids, c.token_ids, c.logprobs, 1.0, None, c.routed_experts, None, c.sampling_mask)
        for p, c in zip(prompts, engine.generate(prompts, params), strict=True)
    ]


def test_an_engine_with_noisy_routers_and_a_hidden_filter_scores_its_own_answers_as_it_reported_them() -> None:
    model = hf_reference(False)
    engine = LocalEngine(
        model.config,
        TOKENIZER,
        dtype=torch.float32,
        device=torch.device("cpu"),
        perturbation=Perturbation(router_noise=1.0, unrecorded_top_p=0.6),
    )
    engine.update_weights(stream_model(model), 0)
    hidden = of_engine(engine)
    engine.reveal_filters()
    shown = of_engine(engine)
    for before, after in zip(hidden, shown, strict=True):
        assert before.sampling_mask is None and after.sampling_mask is not None
        assert torch.equal(before.labels, after.labels), "the same draws, told otherwise"
    for sample, row in zip(shown, rescore_by_engine(engine, shown, TEMPERATURE), strict=True):
        assert sample.rollout_logprobs is not None and sample.sampling_mask is not None
        difference = (row - sample.rollout_logprobs)[sample.loss_mask].abs().max()
        assert difference < 1e-5
    head = rescore_by_engine(engine, shown, TEMPERATURE, fp32_head=True)
    plain = rescore_by_engine(engine, shown, TEMPERATURE)
    assert all(torch.equal(a, b) for a, b in zip(head, plain, strict=True)), "fp32 already"
    live = rescore(model, [replace(sample, sampling_mask=None) for sample in shown], temperature=TEMPERATURE)
    assert max(float((a - b).abs().max()) for a, b in zip(live, head, strict=True)) > 0.1, "noise and filter do matter"
    engine.close()


def test_the_sets_of_a_filter_are_those_that_the_engine_records() -> None:
    model = hf_reference(False, dense=True)
    engine = LocalEngine(model.config, TOKENIZER, dtype=torch.float32, device=torch.device("cpu"))
    engine.update_weights(stream_model(model), 0)
    prompt = Prompt(prompt_id="", text="", token_ids=(5, 9), label="")
    params = SamplingParams(
        max_new_tokens=9, temperature=TEMPERATURE, top_k=7, top_p=0.8, seed=3, return_sampling_mask=True
    )
    (result,) = engine.generate([prompt], params)
    engine.close()
    plain = to_training_sample(prompt.token_ids, result.token_ids, result.logprobs, 1.0)
    cut = with_filter(model, plain, params, len(result.token_ids)).sampling_mask
    assert cut is not None and result.sampling_mask is not None
    assert torch.equal(cut.counts, result.sampling_mask.counts) and torch.equal(cut.ids, result.sampling_mask.ids)

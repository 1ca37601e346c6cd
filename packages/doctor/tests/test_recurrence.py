"""Linear attention token by token: what the local engine reports when it decodes, and what a coarse state changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_dppo.data.training_samples import to_training_sample
from megatron_dppo.engines.local.engine import LocalEngine
from megatron_dppo.errors import ConfigError
from megatron_dppo.hf.folder import build_hf_model, model_shape, stream_model
from megatron_dppo.setup.inputs import family_problems
from megatron_dppo.types import Prompt, SamplingParams, TrainingSample
from megatron_dppo_doctor.diagnose.ledger import Cause, CauseScoring, make_ledger
from megatron_dppo_doctor.diagnose.rescore import rescore, rescore_by_engine
from megatron_dppo_lab.perturbation import Perturbation
from tests.distributed.families import family_config, in_float64
from tests.distributed.parity import randomize
from tests.silent_tokenizer import SilentTokenizer
from tests.unit.configs import config as run_config

FAMILIES = ("qwen3_next", "qwen3_5_moe_text")
PROMPTS = [
    Prompt(prompt_id="", text="", token_ids=tuple((7 * i + 5 * n) % 100 + 3 for i in range(length)), label="")
    for n, length in enumerate((3, 70, 140))
]
"""Prompts below, above and far above the 64 tokens of a chunk."""


def sampled(
    family: str, perturbation: Perturbation, dtype: torch.dtype = torch.float32
) -> tuple[LocalEngine, list[TrainingSample]]:
    """An engine with the weights of ``model_of``, and its responses of 40 tokens."""
    model = model_of(family)
    engine = LocalEngine(
        model.config, SilentTokenizer(), dtype=dtype, device=torch.device("cpu"), perturbation=perturbation
    )
    engine.update_weights(stream_model(model), 0)
    responses = engine.generate(PROMPTS, SamplingParams(max_new_tokens=40, seed=3))
    rows = zip(PROMPTS, responses, strict=True)
    return engine, [to_training_sample(p.token_ids, c.token_ids, c.logprobs, 1.0) for p, c in rows]


def model_of(family: str) -> torch.nn.Module:
    config = family_config(family)
    # With a choice, a state's rounding gives some token other experts, and that is most of the difference.
    config.num_experts_per_tok = config.num_experts
    return randomize(build_hf_model(config, torch.float32, seed=0))


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_perturbation_all_ways_of_computing_agree_with_float64(family: str) -> None:
    engine, samples = sampled(family, Perturbation())
    exact = in_float64(model_of(family))
    for sample in samples:
        with torch.no_grad():
            expected = exact(sample.tokens[None]).logits[0].log_softmax(-1).gather(1, sample.labels[:, None])[:, 0]
        for token_by_token in (False, True):
            (row,) = rescore_by_engine(engine, [sample], 1.0, token_by_token=token_by_token)
            assert (row - expected).abs().max() < 2e-5, token_by_token
    engine.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_coarse_state_is_attributed_to_the_recurrence_and_to_nothing_else(family: str) -> None:
    engine, samples = sampled(family, Perturbation(state_dtype="bf16"))
    in_chunks = rescore_by_engine(engine, samples, 1.0)
    token_by_token = rescore_by_engine(engine, samples, 1.0, token_by_token=True)
    exact = rescore(model_of(family), samples, temperature=1.0)

    def tokens(rows: list[Tensor]) -> Tensor:
        return torch.cat([row[s.loss_mask] for row, s in zip(rows, samples, strict=True)])

    reported = [s.rollout_logprobs for s in samples if s.rollout_logprobs is not None]
    chain = [(Cause.UNEXPLAINED, in_chunks), (Cause.RECURRENCE, token_by_token), (Cause.ENGINE, reported)]
    ledger = make_ledger(tokens(exact), [CauseScoring(cause, tokens(rows)) for cause, rows in chain])
    shares = {row.cause: row.share for row in ledger.rows}
    # A batch is decoded with padding, whose last bits round some states the other way.
    assert ledger.total > 1e-4 and shares[Cause.RECURRENCE] == pytest.approx(1, abs=0.1), shares
    assert {row.cause: row.size for row in ledger.rows}[Cause.UNEXPLAINED] < 1e-2 * ledger.total
    engine.close()


def test_the_model_is_as_before_after_a_scoring_that_failed() -> None:
    engine, samples = sampled("qwen3_next", Perturbation())
    before = rescore_by_engine(engine, samples, 1.0)
    broken = [to_training_sample([1, 2], [10**6], [-1.0], 1.0)]
    with pytest.raises((IndexError, RuntimeError)):
        rescore_by_engine(engine, broken, 1.0, token_by_token=True)
    assert all(torch.equal(a, b) for a, b in zip(before, rescore_by_engine(engine, samples, 1.0), strict=True))
    engine.close()


def test_a_coarse_state_needs_linear_attention() -> None:
    config = run_config(rollout={"perturbation": {"state_dtype": "bf16"}})
    assert not list(family_problems(config.rollout, config.lora, model_shape(family_config("qwen3_next"))))
    (problem,) = family_problems(config.rollout, config.lora, model_shape(family_config("qwen3_moe")))
    assert isinstance(problem, ConfigError) and "state_dtype = 'bf16'" in str(problem)
    assert "no linear attention" in str(problem)

"""The local engine and Megatron give the same log-probabilities when both compute in fp32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from columns import same
from megatron_dppo.config.layout import resolve_layout
from megatron_dppo.data.chat import load_tokenizer
from megatron_dppo.data.training_samples import pack, to_training_sample
from megatron_dppo.engines.local.engine import LocalEngine
from megatron_dppo.hf.folder import DictWeights, build_hf_model, model_shape, read_hf_config, stream_model
from megatron_dppo.parallel.platform import Platform
from megatron_dppo.types import Completion, Prompt, SamplingParams
from tests.distributed.parity import Case, config_for
from tests.distributed.spawn import run_distributed

pytestmark = pytest.mark.distributed

MODEL = Path(__file__).parents[2] / "examples/chain_sum/model"
TEMPERATURE = 0.7


def prompts(tokenizer) -> list[Prompt]:  # type: ignore[no-untyped-def]
    texts = ["7+8-3=", "1=", "9-9-9=", "2+2+2+2="] * 8
    return [Prompt(prompt_id=t, text=t, token_ids=tuple(tokenizer(t).input_ids), label="") for t in texts]


def _largest_difference(rank: int, world_size: int) -> None:
    from megatron_dppo.mcore.shims import apply_shims

    platform = Platform.detect(force_cpu=True)
    apply_shims(platform)
    from megatron_dppo.mcore.model_parts import Placement
    from megatron_dppo.mcore.setup import initialize_megatron
    from megatron_dppo.run.policy_setup import trainer_from_config

    config = config_for(Case({"expert_model_parallel_size": 2}))
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"temperature": TEMPERATURE})})
    hf_config, tokenizer = read_hf_config(MODEL), load_tokenizer(MODEL)
    layout = resolve_layout(config.parallel, config.batch, world_size, model_shape(hf_config))
    placement = Placement(hf_config, layout, initialize_megatron(layout, platform, seed=1, timeout_minutes=3), platform)
    trainer = trainer_from_config(
        config, placement, DictWeights(stream_model(build_hf_model(hf_config, torch.float32, seed=3)))
    )
    params = SamplingParams(max_new_tokens=12, temperature=TEMPERATURE, seed=5)
    largest = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        engine = LocalEngine(hf_config, tokenizer, dtype=dtype, device=platform.device)
        engine.update_weights(trainer.export_weights(), version=4)
        completions = engine.generate(prompts(tokenizer), params)
        assert same(completions, engine.generate(prompts(tokenizer), params)), "same seed, same responses"
        assert {c.policy_version for c in completions} == {4}
        check_ends(completions, tokenizer.eos_token_id)
        samples = [
            to_training_sample(p.token_ids, c.token_ids, c.logprobs, 1.0)
            for p, c in zip(prompts(tokenizer), completions, strict=True)
        ]
        batch = pack(samples)
        assert batch.rollout_logprobs is not None
        difference = (trainer.logprobs([batch])[0] - batch.rollout_logprobs).abs()[batch.loss_mask]
        largest[name] = float(difference.max())
    assert largest["fp32"] < 1e-5, largest
    assert largest["bf16"] > 1e-3, "bf16 rollouts are meant to differ from fp32 training"
    dist.barrier()


def check_ends(completions: list[Completion], eos: int) -> None:
    for completion in completions:
        assert completion.logprobs is not None and len(completion.logprobs) == len(completion.token_ids)
        ended = int(completion.token_ids[-1]) == eos
        assert completion.finish_reason == ("stop" if ended else "length")
        assert eos not in completion.token_ids[:-1].tolist()
        assert ended or len(completion.token_ids) == 12
    assert len({tuple(c.token_ids.tolist()) for c in completions}) > 20, "samples of one prompt differ"


def test_engine_and_trainer_agree_in_equal_dtypes() -> None:
    run_distributed(_largest_difference, 2)

"""Every combination of policies over the local engine: each number is that of its weights, a run repeats bit for bit,
and a resumed one goes on bit for bit."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from columns import same
from megatron_dppo.engines.local.engine import LocalEngine
from megatron_dppo.hf.folder import stream_model
from megatron_dppo.types import Prompt
from tests.unit.combinations import STEPS, Combination, Loop, combinations, numbers, with_tool
from tests.unit.engines.test_server_engine import FakeTokenizer

CONFIG = Qwen3MoeConfig(
    vocab_size=24,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    eos_token_id=[2, 3, 4],
    pad_token_id=0,
    initializer_range=0.2,
)
LIMIT = 12
EVERY = [
    pytest.param(combination, id=str(combination), marks=[] if i % 5 == 1 else [pytest.mark.long])
    for i, combination in enumerate(combinations(servers=False))
]


def prompt_at(position: int) -> Prompt:
    return Prompt(prompt_id=str(position), text="", token_ids=(7 + position % 5, 8, *[9] * (position % 3)), label="")


@lru_cache
def model_of(version: int) -> Qwen3MoeForCausalLM:
    torch.manual_seed(version)
    return Qwen3MoeForCausalLM(CONFIG).eval()


@torch.no_grad()
def reference(version: int, prompt: tuple[int, ...], response: tuple[int, ...]) -> Tensor:
    """Return the log-probabilities of one pass over the whole sequence."""
    logits = model_of(version)(torch.tensor([[*prompt, *response]])).logits[0]
    return logits[len(prompt) - 1 : -1].log_softmax(-1)


class Tokenizer(FakeTokenizer):
    pad_token_id = 0


def start(combination: Combination) -> tuple[Loop, LocalEngine]:
    function = with_tool if combination.turns else None
    engine = LocalEngine(
        CONFIG, Tokenizer(), dtype=torch.float32, device=torch.device("cpu"), max_batch=6, function=function
    )

    def publish(version: int) -> None:
        engine.update_weights(stream_model(model_of(version)), version)

    return Loop(combination, engine, "local", prompt_at, publish, reference, LIMIT), engine


@pytest.mark.parametrize("combination", EVERY)
def test_every_token_has_the_version_that_sampled_it(combination: Combination, tmp_path: Path) -> None:
    loop, engine = start(combination)
    half = STEPS // 2
    collected = list(loop.steps(half))
    loop.save(tmp_path / "saved")
    other, second = start(combination)
    other.resume(loop, tmp_path / "saved")
    collected += loop.steps(STEPS)
    loop.check_prompts(collected)
    expected = [numbers(c.groups) for c in collected]
    assert same([numbers(c.groups) for c in other.steps(STEPS)], expected[half:])
    for made, stream in ((engine, loop.stream), (second, other.stream)):
        made.close()
        stream.close()

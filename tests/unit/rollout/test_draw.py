"""The local engine draws as transformers does, without touching the random states of the process."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from columns import same
from megatron_dppo.data.chat import load_tokenizer
from megatron_dppo.engines.local.engine import LocalEngine
from megatron_dppo.hf.folder import build_hf_model, read_hf_config, stream_model
from megatron_dppo.types import Prompt, SamplingParams

MODEL = Path(__file__).parents[3] / "examples/chain_sum/model"
DEVICE = torch.device("cpu")


@pytest.fixture(scope="module")
def parts() -> tuple[LocalEngine, Any, list[Prompt]]:
    config, tokenizer = read_hf_config(MODEL), load_tokenizer(MODEL)
    model = build_hf_model(config, torch.float32, seed=1)
    engine = LocalEngine(config, tokenizer, dtype=torch.float32, device=DEVICE)
    engine.update_weights(stream_model(model), 0)
    ids = tuple(tokenizer("7+8-3=").input_ids)
    return engine, model, [Prompt(prompt_id=str(i), text="", token_ids=ids, label="") for i in range(8)]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_p": 0.8}, {"temperature": 1.3, "top_k": 5}])
def test_the_tokens_are_those_of_transformers_own_sampling(parts: Any, sampling: dict[str, Any]) -> None:
    engine, model, prompts = parts
    completions = engine.generate(prompts, SamplingParams(max_new_tokens=6, seed=3, **sampling))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        ids = torch.tensor([p.token_ids for p in prompts])
        settings = {"temperature": 1.0, "top_p": 1.0, "top_k": 0} | sampling
        expected = model.generate(
            input_ids=ids,
            max_new_tokens=6,
            do_sample=True,
            pad_token_id=0,
            eos_token_id=sorted(engine._end_tokens),
            **settings,
        )[:, ids.shape[1] :]
    for completion, row in zip(completions, expected.tolist(), strict=True):
        assert completion.token_ids.tolist() == row[: len(completion.token_ids)]


def test_sampling_in_a_thread_does_not_depend_on_the_global_generator(parts: Any) -> None:
    engine, _, prompts = parts
    params = SamplingParams(max_new_tokens=12, seed=5)
    expected, actual = engine.generate(prompts, params), []
    before = torch.get_rng_state()
    thread = threading.Thread(target=lambda: actual.extend(engine.generate(prompts, params)))
    thread.start()
    while thread.is_alive():  # as recomputation does in the backward pass
        torch.manual_seed(random.getrandbits(30))
    thread.join()
    torch.set_rng_state(before)
    assert same(actual, expected)
    engine.generate(prompts, params)
    assert torch.equal(torch.get_rng_state(), before), "the trainer's random state must not move"

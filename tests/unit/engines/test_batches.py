"""A batch of the local engine is split by the memory of its largest tensors, and samples the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from columns import same
from megatron_dppo.config.layout import resolve_layout
from megatron_dppo.engines.local import engine as engine_module
from megatron_dppo.engines.local import sampler as sampler_module
from megatron_dppo.engines.local.batches import MAX_VALUES, BatchMemory, split_batch
from megatron_dppo.engines.local.engine import LocalEngine
from megatron_dppo.hf.folder import build_hf_model, model_shape, stream_model
from megatron_dppo.types import Completion, Prompt
from tests.distributed.families import TINY, family_config
from tests.unit.engines.test_local_engine import CONFIG, MODEL, PROMPTS, SIBLINGS, TOKENIZER, engine, params, submitted

EXAMPLE = MODEL.parent / "dppo.toml"
ONE_LONG = (3, 4, 5, 200, 4, 3, 2, 6)
"""Tokens of each prompt."""


class LargestTensor(TorchDispatchMode):
    """Records the most elements of a tensor that torch allocates."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in torch.utils._pytree.tree_leaves(result):
            if isinstance(each, Tensor):
                # Views take no memory: what counts is the storage.
                self.elements = max(self.elements, each.untyped_storage().nbytes() // each.element_size())
        return result


def sample_one_long(model: Any, **settings: Any) -> tuple[list[Completion], int]:
    """Responses to short prompts and a long one, and the elements of the largest tensor."""
    made = LocalEngine(model.config, TOKENIZER, dtype=torch.float32, device=torch.device("cpu"))
    made.update_weights(stream_model(model), 0)
    prompts = [
        Prompt(prompt_id="", text="", token_ids=tuple((7 * i + 3 * n) % 100 for i in range(n)), label="")
        for n in ONE_LONG
    ]
    largest = LargestTensor()
    made.thread.submit(largest.__enter__).result()
    completions = made.generate(prompts, params(max_new_tokens=4, **settings))
    made.thread.submit(largest.__exit__, None, None, None).result()
    return completions, largest.elements


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next"])
def test_one_long_prompt_does_not_multiply_with_its_batch(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = family_config(family)
    config.eos_token_id = 2
    model = build_hf_model(config, torch.float32, seed=1)
    memory = BatchMemory.from_config(config)
    whole, largest = sample_one_long(model)
    # What the long prompt takes alone, which no split can change.
    bound = memory.count(rows=1, prompts=1, width=200, limit=4, is_padded=False)
    alone = max(bound, max(p.numel() for p in model.parameters()))
    # Attention sinks are one more column, and chunks of linear attention are filled up: 256 tokens for 200.
    alone = round(1.3 * alone)
    assert largest > 2 * alone
    monkeypatch.setattr(engine_module, "MAX_VALUES", bound)
    split, largest = sample_one_long(model)
    assert largest <= alone
    assert [c.token_ids.tolist() for c in split] == [c.token_ids.tolist() for c in whole]


@pytest.mark.parametrize("largest_race", [1 << 22, 0], ids=["race", "inversion"])
@pytest.mark.parametrize("max_batch", [512, 7])
@pytest.mark.parametrize("bound", [0, 12, 40])
def test_the_split_changes_no_token(
    bound: int, max_batch: int, largest_race: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler_module, "LARGEST_RACE", largest_race)
    settings = {"topk_logprobs": 3, "routed_experts": True, "return_sampling_mask": True, "top_p": 0.9}
    prompts = [prompt for prompt in PROMPTS for _ in range(SIBLINGS)]
    expected = engine(max_batch=max_batch).generate(prompts, params(**settings))
    parts: list[range] = []

    def record_split(*args: Any) -> list[range]:
        # ``bound`` counts pairs of tokens, of which a cache or an activation has as many as it likes here.
        rows = list(split_batch(BatchMemory(score_heads=0, cached=0, width=1), *args[1:3], bound))
        parts.extend(rows)
        return rows

    monkeypatch.setattr(engine_module, "split_batch", record_split)
    actual = engine(max_batch=max_batch).generate(prompts, params(**settings))
    assert len(parts) > len(range(0, len(prompts), max_batch))
    assert len({len(c.token_ids) for c in expected}) > 4
    for one, other in zip(actual, expected, strict=True):
        assert same(one.token_ids, other.token_ids) and one.finish_reason == other.finish_reason
        assert same(one.routed_experts, other.routed_experts) and same(one.sampling_mask, other.sampling_mask)
        assert same(one.topk_token_ids, other.topk_token_ids)
        torch.testing.assert_close(one.logprobs, other.logprobs, atol=2e-5, rtol=0)


def test_a_reached_target_leaves_later_parts_out(monkeypatch: pytest.MonkeyPatch) -> None:
    complete = submitted(engine(), len(PROMPTS))
    rows_by_part = range(SIBLINGS, len(PROMPTS) * SIBLINGS, SIBLINGS)
    starts = [0, *rows_by_part]
    monkeypatch.setattr(engine_module, "split_batch", lambda *_: [range(i, i + SIBLINGS) for i in starts])
    one = engine()
    found = submitted(one, 2, keep=range(len(PROMPTS)))
    # Parts are groups here, so the first two are complete, and the others have not begun.
    assert [[c.token_ids.tolist() for c in group] for group in found[:2]] == [
        [c.token_ids.tolist() for c in group] for group in complete[:2]
    ]
    assert found[2:] == [None] * (len(PROMPTS) - 2)
    assert all(len(state.token_ids) == 0 for key in one.unfinished() for state in one.unfinished()[key])
    # They go on as new ones.
    assert all(group is not None for group in submitted(one, len(PROMPTS)))


@pytest.mark.parametrize("name", TINY)
def test_sizes_are_those_of_the_cache_that_transformers_fills(name: str) -> None:
    config = family_config(name)
    model = build_hf_model(config, torch.float32, seed=1)
    with torch.no_grad():
        cache = model(input_ids=torch.arange(2)[None], use_cache=True).past_key_values
    keys = [(layer.keys, layer.values) for layer in cache.layers if getattr(layer, "keys", None) is not None]
    per_token = sum(k.numel() + v.numel() for k, v in keys) / 2
    if model_shape(config).has_latent_attention:
        per_token = max(per_token, 4 * (config.qk_head_dim + config.v_head_dim))  # 4 heads
    assert BatchMemory.from_config(config).cached == per_token


def test_rows_of_a_part_stay_within_the_bound_and_repeated_prompts_count_once() -> None:
    memory = BatchMemory(score_heads=0, cached=1, width=0)
    prompts = [[1]] * 6
    assert list(split_batch(memory, prompts, [9] * 6, 30)) == [range(0, 3), range(3, 6)]
    assert list(split_batch(memory, prompts, [9] * 6, 1)) == [range(i, i + 1) for i in range(6)]
    assert list(split_batch(memory, [], [], 1)) == []
    # The longest response counts for all rows of its part, and for no other part.
    assert list(split_batch(memory, [[1]] * 6, [9, 1, 1, 1, 1, 1], 25)) == [range(2), range(2, 6)]
    # Prompts and lengths of earlier parts do not count either.
    scores = BatchMemory(score_heads=1, cached=0, width=0)
    assert list(split_batch(scores, [[1], [2], [3], [4]], [1] * 4, 2)) == [range(2), range(2, 4)]
    assert list(split_batch(scores, [[1, 2, 3], [4], [5]], [1] * 3, 9)) == [range(1), range(1, 3)]
    masks = BatchMemory(score_heads=0, cached=0, width=0)
    # No mask without padding, and one mask for two responses to a prompt.
    assert list(split_batch(masks, [[1, 2], [3, 4]] * 3, [1] * 6, 1)) == [range(6)]
    assert list(split_batch(masks, [[1, 2]] * 3 + [[3]], [1] * 4, 8)) == [range(4)]
    assert list(split_batch(masks, [[1, 2], [2, 3], [3]], [1] * 3, 8)) == [range(2), range(2, 3)]


def test_the_batches_of_the_examples_are_not_split() -> None:
    memory = BatchMemory.from_config(CONFIG)
    assert list(split_batch(memory, [[i] * (20 + i % 9) for i in range(512)], [64] * 512, MAX_VALUES)) == [range(512)]


def test_plan_and_dry_run_count_a_long_prompt() -> None:
    from megatron_dppo.config.io import load_config
    from megatron_dppo.setup.local_engine_memory import LocalEngineMemory

    config = load_config(EXAMPLE, ["--rollout.dtype", "fp32"])
    layout = resolve_layout(config.parallel, config.batch, 2, model_shape(CONFIG))
    prompts, siblings, new = (
        config.rollout.prompts_per_step // 2,
        config.rollout.samples_per_prompt,
        config.rollout.max_new_tokens,
    )
    rows, cached = min(512, prompts * siblings), 2 * 2 * CONFIG.num_key_value_heads * CONFIG.head_dim
    assert CONFIG.num_hidden_layers == 2
    inner = 2 * max(CONFIG.hidden_size, CONFIG.num_experts_per_tok * CONFIG.moe_intermediate_size)
    distinct = min(rows, prompts)
    expected = distinct * (30 * 30 + 30 * inner) + rows * (30 + new) * cached
    memory = LocalEngineMemory.from_config(config.rollout, config.data, CONFIG, 1000, layout, longest_prompt=30)
    assert memory == (4000, 4 * expected)
    # A batch is at most the bound, but one response cannot be split.
    assert (
        LocalEngineMemory.from_config(config.rollout, config.data, CONFIG, 1000, layout, 20_000).batch == 4 * MAX_VALUES
    )
    alone = (MAX_VALUES + new) * cached + MAX_VALUES * inner
    assert (
        LocalEngineMemory.from_config(config.rollout, config.data, CONFIG, 1000, layout, MAX_VALUES).batch == 4 * alone
    )
    config = load_config(EXAMPLE.parent / "sglang.toml")
    assert LocalEngineMemory.from_config(config.rollout, config.data, CONFIG, 1000, layout) == (0, 0)

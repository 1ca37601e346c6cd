"""Split of a batch of the local engine by the memory that its largest tensors need."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from megatron_dppo.hf.families import get_family
from megatron_dppo.hf.folder import model_shape
from megatron_dppo.types.model_folder import HfConfig

MAX_BATCH = 512
MAX_VALUES = 1 << 30
"""Largest number of values in memory for a batch: 4 GiB in fp32. A constant, so that all machines split equally."""
_DELTA_CHUNK = 64
"""Tokens of a chunk of linear attention in transformers, all pairs of which are in memory."""


@dataclass(frozen=True, kw_only=True)
class BatchMemory:
    """Values of a batch in memory, by the sizes of the model."""

    score_heads: int
    """Heads whose attention scores of all pairs of tokens are in memory at once. 0 if a fused kernel computes them."""
    cached: int
    """Cached values per token, in all layers, or those that a layer expands them to."""
    width: int
    """Values per token of the widest layer."""

    @classmethod
    def from_config(cls, hf_config: HfConfig) -> Self:
        """Return the sizes of a model as transformers computes it."""
        shape = model_shape(hf_config)
        fields = get_family(hf_config).fields(hf_config, shape)
        heads = shape.num_attention_heads
        num_layers = shape.num_layers - len(shape.linear_layers)
        cached = num_layers * 2 * shape.num_query_groups * fields["kv_channels"]
        if shape.has_latent_attention:
            latent = fields["kv_lora_rank"] + fields["qk_pos_emb_head_dim"]
            # Each layer expands the complete cache to keys and values of all heads.
            expanded = fields["qk_head_dim"] + fields["qk_pos_emb_head_dim"] + fields["v_head_dim"]
            cached = max(num_layers * latent, heads * expanded)
        experts = getattr(hf_config, "num_experts_per_tok", None) or 1
        dense = getattr(hf_config, "intermediate_size", None) or 0
        routed = experts * (getattr(hf_config, "moe_intermediate_size", None) or dense)
        linear = 0 if shape.linear is None else shape.linear.num_value_heads * _DELTA_CHUNK
        # Fused kernels on the CPU need values as wide as keys, and have no sinks.
        has_kernel = not shape.has_latent_attention and not shape.has_attention_sinks
        return cls(
            score_heads=0 if has_kernel else heads,
            cached=cached,
            # Gate and input of an MLP come from one matrix.
            width=max(2 * max(shape.hidden_size, dense, routed), linear),
        )

    def count(self, *, rows: int, prompts: int, width: int, limit: int, is_padded: bool) -> int:
        """Return the values of attention scores and activations of a layer that reads the prompts, and of the cache.

        Prompts are distinct, the longest of ``width`` tokens; ``limit`` is the most new tokens of a row. With
        ``is_padded`` prompts differ in length, and each has a mask of all pairs of tokens.
        """
        pairs = prompts * width * width * max(self.score_heads, int(is_padded))
        return pairs + prompts * width * self.width + rows * (width + limit) * self.cached

    def max_batch_values(self, *, rows: int, prompts: int, width: int, limit: int) -> int:
        """Return the most values of a part of a batch. The arguments are those of ``count`` for the complete batch."""
        rows = min(rows, MAX_BATCH)
        complete = self.count(rows=rows, prompts=min(rows, prompts), width=width, limit=limit, is_padded=prompts > 1)
        return max(min(complete, MAX_VALUES), self.count(rows=1, prompts=1, width=width, limit=limit, is_padded=False))


def split_batch(
    memory: BatchMemory, prompts: Sequence[Sequence[int]], limits: Sequence[int], max_values: int
) -> Iterator[range]:
    """Yield the rows of consecutive parts of a batch, each as long as its values stay within a bound.

    A part has at least one row. The order is kept: sorted by length, responses to short prompts would come first.
    """
    start = 0
    distinct: set[tuple[int, ...]] = set()
    lengths: set[int] = set()
    for row, prompt in enumerate(prompts):
        distinct.add(tuple(prompt))
        lengths.add(len(prompt))
        values = memory.count(
            rows=row + 1 - start,
            prompts=len(distinct),
            width=max(lengths),
            limit=max(limits[start : row + 1]),
            is_padded=len(lengths) > 1,
        )
        if values > max_values and row > start:
            yield range(start, row)
            start = row
            distinct = {tuple(prompt)}
            lengths = {len(prompt)}
    if len(prompts) > start:
        yield range(start, len(prompts))

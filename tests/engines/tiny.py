"""A tiny Qwen3-MoE on disk, and transformers as the reference for what a server says of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from megatron_dppo.hf.folder import WeightStream, stream_model
from megatron_dppo.types import RoutingShape

VOCAB = 512
LAYERS = 2
EXPERTS = 8
TOP_K = 2
ROUTING = RoutingShape(num_layers=LAYERS, num_experts=EXPERTS, topk=TOP_K)
END = 2
SPECIAL = ["<pad>", "<s>", "</s>"]


def make_tiny(folder: Path, seed: int, *, vocab_size: int = VOCAB) -> Path:
    """Random float32 weights, large enough that log-probabilities differ; a tokenizer of bytes.

    Args:
        folder: is made.
        seed: of the weights.
        vocab_size: rows of the embedding; the tokenizer has 259 entries.
    """
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=END,
        pad_token_id=0,
        initializer_range=0.1,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    byte_tokenizer(SPECIAL).save_pretrained(folder)
    return folder


def make_tied(folder: Path, seed: int) -> Path:
    """Make a tiny Qwen2-MoE: tied embeddings, biases on q, k and v, a gated shared expert of another size.

    Args:
        folder: is made.
        seed: of the weights.
    """
    torch.manual_seed(seed)
    config = Qwen2MoeConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=32,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        qkv_bias=True,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=END,
        pad_token_id=0,
        initializer_range=0.1,
    )
    model = Qwen2MoeForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # zeros would hide one that is left out
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    byte_tokenizer(SPECIAL).save_pretrained(folder)
    return folder


def byte_tokenizer(special: Sequence[str]) -> PreTrainedTokenizerFast:
    """One token a byte, after the special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate([*special, *alphabet])}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    pad, start, end = special[:3]
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=start, eos_token=end, pad_token=pad)


@dataclass
class Reference:
    """Reference values of transformers with the weights of a folder.

    If two experts are equally probable up to rounding, another program may choose the other expert, which moves
    log-probabilities by tenths (1 of 100,000 tokens). From such a token on, values are NaN, which ``difference`` skips.
    """

    folder: Path

    def __post_init__(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def distributions(self, prompt: Sequence[int], response: Sequence[int], temperature: float) -> Tensor:
        """Return the log-probabilities at each response token. Shape ``[R, V]``."""
        logits, router = self._run([*prompt, *response])
        rows = slice(len(prompt) - 1, -1)
        return torch.where(_is_known(router)[rows, None], (logits[rows] / temperature).log_softmax(-1), torch.nan)

    def logprobs(self, prompt: Sequence[int], response: Sequence[int], temperature: float) -> Tensor:
        """Return the log-probabilities of the response tokens. Shape ``[R]``."""
        return self.distributions(prompt, response, temperature).gather(1, torch.tensor(response)[:, None]).squeeze(1)

    @torch.no_grad()
    def check_experts(self, routes: Tensor | None, tokens: Sequence[int], start: int = 0) -> None:
        """Check that routes are the most probable experts of the tokens, in decreasing order.

        Args:
            routes: Experts of the tokens from ``start`` on. Shape ``[N, L, k]``.
            tokens: Token ids of the sequence.
            start: Index of the token of the first row.
        """
        assert routes is not None
        _, router = self._run(tokens)
        rows = slice(start, start + len(routes))
        best = torch.where(_is_known(router)[rows, None, None], router[rows].topk(TOP_K, -1).values, torch.nan)
        # Of two experts that are equally probable but for rounding either may come first.
        assert difference(router[rows].gather(2, routes.long()), best) < 1e-5

    def weights(self) -> WeightStream:
        """Return the weights by Hugging Face name, one entry per expert."""
        return stream_model(self.model)

    def _run(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the logits ``[S, V]`` and the router logits ``[S, L, E]``."""
        output = self.model(torch.tensor([tokens]), output_router_logits=True)
        return output.logits[0], torch.stack(output.router_logits, 1)


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference where the reference is not NaN."""
    assert found.shape == expected.shape
    apart = torch.where(expected.isnan(), 0, (found - expected).abs())
    return float(apart.max()) if apart.numel() else 0.0


def _is_known(router: Tensor) -> Tensor:
    """Return True where rounding changes no expert of a token or an earlier one. Shape ``[S]``."""
    last, next_one = router.topk(TOP_K + 1, -1).values[..., -2:].unbind(-1)
    tied = (last - next_one < 1e-5).any(1)
    assert tied.sum() < 4, "ties are rare: one in 10,000 tokens"
    return tied.cumsum(0) == 0

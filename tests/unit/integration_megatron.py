"""Run by test_integrations.py: Megatron's schedule with the integration, against the same loss of whole logits."""

from __future__ import annotations

import json
import sys
from functools import partial
from importlib import util
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from megatron_dppo.mcore.shims import apply_shims  # noqa: E402
from megatron_dppo.parallel.platform import Platform  # noqa: E402

apply_shims(Platform.detect())

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

import megatron_dppo as md  # noqa: E402

VOCAB, BATCH, TOKENS, TOPK = 30, 2, 9, 4
LIMITS = {"dppo_binary_tv": 0.01, "dppo_topk_tv": 0.12}
KEYS = {"dppo_binary_tv": {}, "dppo_topk_tv": {"topk": TOPK}}


class Attention(torch.nn.Module):
    """Megatron's own asks CUDA for its random numbers."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object):
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [S, B, heads, width]
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return out.permute(2, 0, 1, 3).flatten(2)


def build() -> GPTModel:
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    sizes = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 32}
    config = TransformerConfig(
        **sizes, calculate_per_token_loss=True, attention_dropout=0.0, hidden_dropout=0.0, use_cpu_initialization=True
    )
    spec = get_gpt_layer_local_spec(normalization="LayerNorm")
    spec.submodules.self_attention.submodules.core_attention = Attention
    return GPTModel(config, spec, vocab_size=32, max_sequence_length=TOKENS, position_embedding_type="rope")


def main() -> None:
    model = build()
    spec = util.spec_from_file_location("dppo", ROOT / "examples/integrations/megatron_lm/dppo.py")
    dppo = util.module_from_spec(spec)
    spec.loader.exec_module(dppo)
    results = {name: compare(model, dppo, name) for name in ("dppo_binary_tv", "dppo_topk_tv")}
    print(json.dumps(results))


def compare(model: GPTModel, dppo: ModuleType, name: str) -> dict[str, float]:
    """The worst gradient against that of the logits, and how many tokens are masked."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCAB, (BATCH, TOKENS + 1), generator=draw)
    tokens, labels, positions = ids[:, :-1], ids[:, 1:], torch.arange(TOKENS).expand(BATCH, -1)
    log_pi = (model(tokens, positions, None)[..., :VOCAB] / 0.8).log_softmax(-1)
    log_mu = (log_pi.detach() + 0.7 * torch.randn(log_pi.shape, generator=draw)).log_softmax(-1)
    logprobs, mu = (x.gather(-1, labels[..., None])[..., 0] for x in (log_pi, log_mu))
    advantages = torch.randn(BATCH, TOKENS, generator=draw)
    mask = torch.arange(TOKENS) >= torch.tensor([[2], [4]])

    # The K most probable tokens of the rollout, the sampled one, and all others as one.
    values, top = log_mu.topk(TOPK, -1)
    outside = ~(top == labels[..., None]).any(-1, keepdim=True)
    in_set = torch.zeros(log_mu.shape, dtype=torch.bool).scatter(-1, torch.cat([top, labels[..., None]], -1), True)
    pi, q = log_pi.detach().exp(), log_mu.exp()
    rest = (pi - q).masked_fill(in_set, 0).sum(-1).abs()
    divergence = ((pi - q).abs().masked_fill(~in_set, 0).sum(-1) + rest) / 2
    moved = logprobs.detach().exp() - mu.exp()
    limit = LIMITS[name]
    dropped = mask & (advantages * moved > 0) & ((moved.abs() if name == "dppo_binary_tv" else divergence) > limit)
    (-(advantages * (logprobs.detach() - mu).exp().clamp(max=5) * logprobs)[mask & ~dropped].sum()).backward()
    expected = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    batch = {"tokens": tokens, "labels": labels, "position_ids": positions, "rollout_logprobs": mu}
    batch |= {"advantages": advantages, "loss_mask": mask}
    config = md.LossConfig(name=name, divergence_threshold_low=limit, divergence_threshold_high=limit, **KEYS[name])
    if config.is_topk:
        require_anchor(dppo, model, batch, config)
        slots = torch.where(outside, labels[..., None], -1)
        batch["rollout_topk_ids"] = torch.cat([top, slots], -1).int()
        batch["rollout_topk_logprobs"] = torch.cat([values, mu[..., None]], -1)
    logged = run(dppo, model, batch, config)
    result = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    assert result.keys() == expected.keys(), result.keys() ^ expected.keys()
    worst = max((result[key] - expected[key]).abs().max() / expected[key].abs().max() for key in expected)
    masked, count = logged["mask_fraction"].tolist()
    assert masked == dropped.sum() and count == mask.sum()
    # The model gives logits again for the next loss.
    del model.output_layer.forward
    model.zero_grad()
    return {"worst": worst.item(), "masked": masked, "tokens": count}


def run(dppo: ModuleType, model: GPTModel, batch: dict[str, torch.Tensor], config: md.LossConfig):
    """One step of Megatron's schedule."""
    step = partial(dppo.forward_step, config=config, vocab_size=VOCAB, temperature=0.8)
    (logged,) = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter([batch]),
        model=model,
        num_microbatches=1,
        seq_length=TOKENS,
        micro_batch_size=BATCH,
    )
    return logged


def require_anchor(dppo: ModuleType, model: GPTModel, batch: dict[str, torch.Tensor], config: md.LossConfig) -> None:
    """A batch without the rollout's Top-K is refused."""
    try:
        run(dppo, model, batch, config)
    except ValueError as error:
        assert "the batch has no rollout_topk_ids and no rollout_topk_logprobs" in str(error), error
    else:
        raise AssertionError("a Top-K loss without the rollout's Top-K")


if __name__ == "__main__":
    main()

"""Run by test_integrations.py: Megatron's schedule with the integration, against the same loss of whole logits."""

from __future__ import annotations

import json
import sys
from functools import partial
from importlib import util
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from megatron_dppo.mcore.compat.shims import apply_shims  # noqa: E402
from megatron_dppo.parallel.platform import Platform  # noqa: E402

apply_shims(Platform.detect())

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

import megatron_dppo as md  # noqa: E402

VOCAB, BATCH, TOKENS, LIMIT = 30, 2, 9, 0.01


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
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCAB, (BATCH, TOKENS + 1), generator=draw)
    tokens, labels, positions = ids[:, :-1], ids[:, 1:], torch.arange(TOKENS).expand(BATCH, -1)
    logits = model(tokens, positions, None)[..., :VOCAB] / 0.8
    logprobs = logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    mu = logprobs.detach() + torch.randn(BATCH, TOKENS, generator=draw)
    advantages = torch.randn(BATCH, TOKENS, generator=draw)
    mask = torch.arange(TOKENS) >= torch.tensor([[2], [4]])
    ratio, moved = (logprobs.detach() - mu).exp(), logprobs.detach().exp() - mu.exp()
    dropped = mask & (((advantages > 0) & (moved > LIMIT)) | ((advantages < 0) & (moved < -LIMIT)))
    (-(advantages * ratio * logprobs)[mask & ~dropped].sum()).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    spec = util.spec_from_file_location("dppo", ROOT / "examples/integrations/megatron_lm/dppo.py")
    dppo = util.module_from_spec(spec)
    spec.loader.exec_module(dppo)
    batch = {"tokens": tokens, "labels": labels, "position_ids": positions, "rollout_logprobs": mu}
    batch |= {"advantages": advantages, "loss_mask": mask}
    config = md.LossConfig(divergence_threshold_low=LIMIT, divergence_threshold_high=LIMIT)
    step = partial(dppo.forward_step, config=config, vocab_size=VOCAB, temperature=0.8)
    (logged,) = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter([batch]),
        model=model,
        num_microbatches=1,
        seq_length=TOKENS,
        micro_batch_size=BATCH,
    )
    result = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert result.keys() == expected.keys(), result.keys() ^ expected.keys()
    worst = max((result[name] - expected[name]).abs().max() / expected[name].abs().max() for name in expected)
    masked, count = logged["mask_fraction"].tolist()
    assert masked == dropped.sum() and count == mask.sum()
    print(json.dumps({"worst": worst.item(), "masked": masked, "tokens": count}))


if __name__ == "__main__":
    main()

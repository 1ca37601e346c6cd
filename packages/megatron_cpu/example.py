"""Train a mixture of experts of released Megatron Core on a CPU; the loss of four steps."""

import torch
import torch.distributed as dist

from megatron_dppo_megatron_cpu.shims import apply_shims

apply_shims(is_cuda=False)

from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
model_parallel_cuda_manual_seed(1)
config = TransformerConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    num_moe_experts=4,
    add_bias_linear=False,
    use_cpu_initialization=True,
)
model = GPTModel(config, get_gpt_layer_local_spec(num_experts=4), vocab_size=64, max_sequence_length=16)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
tokens = torch.arange(8)[None]
causal = torch.ones(1, 1, 8, 8).triu(1).bool()
for _ in range(4):
    loss = model(tokens, tokens, causal, labels=tokens.roll(-1)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.3f}")
dist.destroy_process_group()

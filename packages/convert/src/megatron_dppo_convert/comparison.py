"""Comparison of the weights that a converter holds with the Hugging Face folder and with transformers."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.data.training_samples import RowShape, pack, to_training_sample
from megatron_dppo.hf.folder import is_mtp_weight, model_shape
from megatron_dppo.hf.weight_files import FolderWeights
from megatron_dppo.run.conversion import Converter

_CHECK_TOKENS = 48


def find_differences(converter: Converter) -> list[str]:
    """Compare the model's weights with the Hugging Face folder: names, shapes, every bit. A collective."""
    source = FolderWeights(converter.hf_folder)
    shape = model_shape(converter.hf_config)
    expected = {name for name in source.names() if not is_mtp_weight(name, shape)}
    exported = set()
    differences = []
    for name, tensor in converter.export():
        exported.add(name)
        if name not in expected:
            differences.append(f"{name} is not in {converter.hf_folder}")
            continue
        # Exact if the model has the folder's dtype, or a wider one.
        original = source[name].to(tensor.dtype)
        if original.shape != tensor.shape:
            differences.append(f"{name} has shape {tuple(tensor.shape)}, expected {tuple(original.shape)}")
        elif not torch.equal(original, tensor.cpu()):
            largest = float((original.double() - tensor.cpu().double()).abs().max())
            differences.append(f"{name} differs by up to {largest:.1e}")
    # A tied folder may hold the output layer as well; the export has it as the embedding only.
    tied = {"lm_head.weight"} if converter.hf_config.tie_word_embeddings else set()
    return differences + [f"{name} was never exported" for name in sorted(expected - exported - tied)]


def measure_logprob_error(converter: Converter) -> float:
    """Return the largest log-probability difference to transformers (fp32) on a random sequence. A collective."""
    from megatron_dppo.mcore.forward import forward_logprobs
    from megatron_dppo.mcore.head import OutputHead

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, converter.hf_config.vocab_size, (_CHECK_TOKENS + 1,), generator=generator).tolist()
    sample = to_training_sample(ids[:1], ids[1:], None, 0.0)
    head = OutputHead(converter.models[-1], converter.groups.tp, converter.hf_config.vocab_size, 1.0)
    batch = pack([sample], RowShape(row_multiple=converter.layout.row_multiple))
    logprobs = forward_logprobs(converter.models, [batch], head)
    # The other stages report 0, so the maximum below is that of the last one.
    error = torch.zeros(1)
    if logprobs:  # on the last pipeline stage
        expected = _transformers_logprobs(converter.hf_folder, sample.tokens, sample.labels)
        error[0] = (logprobs[0].cpu()[: sample.num_tokens] - expected).abs().max()
    if converter.groups.world is not None:
        device = next(converter.models[0].parameters()).device
        error = error.to(device)
        dist.all_reduce(error, dist.ReduceOp.MAX)
    return float(error)


def _transformers_logprobs(folder: Path, tokens: Tensor, labels: Tensor) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    with torch.no_grad():
        logp = model(tokens[None]).logits[0].float().log_softmax(-1)
    return logp.gather(-1, labels[:, None]).squeeze(-1)

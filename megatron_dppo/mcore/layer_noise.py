"""Adaptive layerwise perturbation (ALP, arXiv 2603.19470): learned Gaussian noise on the layers' inputs, in updates.

As in the authors' repository (amazon-science/adaptive-layerwise-perturbation, README and decoder-layer patch), layer l
gets h + sigma_l * noise, with one learned log sigma per layer. The policy under noise is the numerator of the ratio,
the rollout policy is its denominator.

The noise is a function of the run's seed, the policy version, the layer and the sequence's tokens. It is therefore the
same on every layout, and in a forward pass that is recomputed. It is not stored: backward generates it again.
The standard deviations belong to the trainer, not to the model: exports, servers and conversions do not contain them.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Self

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_dppo.config.train import LayerNoiseConfig
from megatron_dppo.parallel.groups import ParallelGroups
from megatron_dppo.types import MicroBatch
from megatron_dppo.types.stored_record import StoredRecord
from megatron_dppo_megatron_cpu.context import ContextShard


@dataclass(frozen=True)
class RowNoise:
    """Noise of one packed row of T tokens, generated on demand."""

    num_tokens: int
    sequences: Sequence[tuple[int, int, str]]
    """For each sequence its start in the row, its number of tokens with noise, and the name that seeds its noise."""
    shard: ContextShard | None
    """Tokens of this context-parallel rank. None without context parallelism."""
    part: tuple[int, int]
    """Rank and size of sequence parallelism."""

    @classmethod
    def from_batch(cls, batch: MicroBatch, shard: ContextShard | None, part: tuple[int, int], name: str) -> Self:
        """Create the noise of a micro-batch in host memory.

        Tokens after a sequence's last loss token get none. No loss token attends to them, and their number depends on
        the padding of the layout.
        """
        starts = batch.cu_seqlens.tolist()
        sequences = []
        for start, end in pairwise(starts):
            loss_positions = batch.loss_mask[start:end].nonzero()
            length = int(loss_positions[-1]) + 1 if len(loss_positions) else 0
            tokens = batch.tokens[start : start + length].numpy().tobytes()
            sequences.append((start, length, f"{name}/{hashlib.sha256(tokens).hexdigest()}"))
        return cls(len(batch.tokens), sequences, shard, part)

    def generate(self, layer: int, like: Tensor) -> Tensor:
        """Return standard normal values, fp32, with shape and device of ``like [num_local_tokens, 1, hidden_size]``."""
        # The whole row on every rank: a rank's tokens then have the same noise on every layout.
        row = torch.zeros(self.num_tokens, like.shape[-1], device=like.device)
        generator = torch.Generator(like.device)
        for start, length, name in self.sequences:
            if length:
                digest = hashlib.sha256(f"{name}/{layer}".encode()).digest()
                # manual_seed takes 63 bits.
                generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
                row[start : start + length].normal_(generator=generator)
        if self.shard is not None:
            row = self.shard.split(row)
        rank, size = self.part
        return row.chunk(size)[rank].view_as(like)


NoiseFactory = Callable[[MicroBatch, ContextShard | None], RowNoise]
"""Creates the noise of a micro-batch in host memory for this rank's tokens of it."""


class LayerNoise:
    """Noise of one policy, with learned standard deviations.

    It wraps ``config.finalize_model_grads_func``. ``adam`` has beta 1, beta 2 and epsilon.

    Attributes:
        log_std: Logarithms of the standard deviations ``[num_noisy_layers]``, float64, equal on all ranks.
        gradient: Gradient of the last update's loss with respect to them, divided by the global token count.
    """

    def __init__(
        self,
        models: Sequence[GPTModel],
        config: TransformerConfig,
        settings: LayerNoiseConfig,
        groups: ParallelGroups,
        seed: int,
        adam: tuple[float, float, float],
    ) -> None:
        self._layers = settings.layers(config.num_layers)
        self._learn = settings.learn
        self._world = groups.world
        self._seed = seed
        tp_size = dist.get_world_size(groups.tp)
        # With sequence parallelism a rank adds the noise of its own part of the row.
        self._part = (dist.get_rank(groups.tp), tp_size) if config.sequence_parallel else (0, 1)
        self._num_replicas = 1 if config.sequence_parallel else tp_size
        """Number of ranks that compute the same gradient for a token."""
        self.log_std = torch.full((len(self._layers),), math.log(settings.std), dtype=torch.float64)
        self.gradient = torch.zeros_like(self.log_std)
        self._adam = torch.optim.Adam([self.log_std], lr=settings.lr, betas=adam[:2], eps=adam[2])
        self._local_log_std: dict[int, Tensor] = {}
        """Values of this stage's layers: leaves on the device that accumulate the gradients of one update."""
        device = next(models[0].parameters()).device
        for model in models:
            for layer in model.decoder.layers:
                number = layer.layer_number - 1
                if number in self._layers:
                    self._local_log_std[number] = torch.zeros((), device=device, requires_grad=settings.learn)
                    layer.register_forward_pre_hook(partial(self._add, number), with_kwargs=True)
        # The schedule calls this hook once after the last micro-batch: all gradients exist, on all ranks.
        config.finalize_model_grads_func = self._wrap_finalize(config.finalize_model_grads_func)

    def for_version(self, policy_version: int) -> NoiseFactory:
        """Return the factory of the noise for the update from this policy version."""
        for number, leaf in self._local_log_std.items():
            leaf.grad = None
            leaf.data.fill_(self.log_std[number - self._layers.start])
        return partial(RowNoise.from_batch, part=self._part, name=f"{self._seed}/{policy_version}")

    def _add(self, layer: int, _module: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Add noise to a layer's input, in rows with noise; a forward pre-hook."""
        noise: RowNoise | None = getattr(kwargs.get("packed_seq_params"), "noise", None)
        if noise is None:
            return None
        hidden = kwargs["hidden_states"]
        return args, kwargs | {
            "hidden_states": _AddNoise.apply(hidden, self._local_log_std[layer], partial(noise.generate, layer))
        }

    def _wrap_finalize(self, finalize: Callable[..., None] | None) -> Callable[..., None]:
        """Return Megatron's ``finalize_model_grads`` followed by the reduction of this class's gradients."""

        def call(model: Any, num_tokens: Tensor | None = None, **kwargs: Any) -> None:
            assert finalize is not None and num_tokens is not None
            # Megatron all-reduces num_tokens in place: afterwards it is the global count.
            finalize(model, num_tokens, **kwargs)
            # On the CPU, because the group of all ranks is a gloo group.
            total = torch.zeros(len(self._layers), dtype=torch.float64)
            gradients = {number: leaf.grad for number, leaf in self._local_log_std.items() if leaf.grad is not None}
            if gradients:
                rows = torch.tensor(list(gradients)) - self._layers.start
                total[rows] = torch.stack(list(gradients.values())).double().cpu()
            # Pipeline stages have different layers and all other ranks different tokens, except for replicas under
            # tensor parallelism: the sum over all ranks counts every token ``num_replicas`` times.
            dist.all_reduce(total, group=self._world)
            self.gradient = total / (self._num_replicas * max(1, int(num_tokens)))

        return call

    def step(self, loss_scale: float, *, applied: bool) -> dict[str, float]:
        """Step the standard deviations if the update was applied; return their mean and maximum as metrics."""
        std = self.log_std.exp()
        if self._learn and applied:
            self.log_std.grad = self.gradient / loss_scale
            self._adam.step()
        return {"layer_noise": float(std.mean()), "layer_noise_max": float(std.max())}

    def state(self) -> dict[str, object]:
        """Return the state for a checkpoint, as JSON values."""
        adam = self._adam.state.get(self.log_std, {})
        return {"log_std": self.log_std.tolist(), "adam": {key: value.tolist() for key, value in adam.items()}}

    def load(self, state: StoredRecord | None) -> None:
        """Restore the result of ``state``. None, or a state of other layers, keeps the initial values."""
        if state is None or len(state["log_std"]) != len(self._layers):
            return
        self.log_std.copy_(torch.tensor(state["log_std"], dtype=torch.float64))
        self._adam.state[self.log_std] = {
            # torch's Adam keeps ``step`` as an fp32 tensor.
            key: torch.tensor(value, dtype=torch.float32 if key == "step" else torch.float64)
            for key, value in state["adam"].items()
        }


class _AddNoise(torch.autograd.Function):
    """Computes ``hidden + exp(log_std) * noise``; backward generates the noise again instead of storing it."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, log_std: Tensor, generate: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.generate = generate
        ctx.std = log_std.exp()
        return hidden + (ctx.std * generate(hidden)).to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        gradient = gradients[0]
        if not ctx.needs_input_grad[1]:
            return gradient, None, None
        # d/d(log_std) of exp(log_std) * noise is exp(log_std) * noise.
        return gradient, ctx.std * (gradient.float() * ctx.generate(gradient)).sum(), None

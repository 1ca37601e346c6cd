"""Adaptive layerwise perturbation (ALP, arXiv 2603.19470): learned Gaussian noise on the layers' inputs, in updates.

Known from its authors' repository (amazon-science/adaptive-layerwise-perturbation, README and the patch of the decoder
layer): h + sigma_l * noise goes into layer l, with one learned log sigma a layer; the policy under noise is the
numerator of the ratio, the rollout's is its denominator.

Noise is a function of the run's seed, the policy version, the layer and the sequence's own tokens. So it is the same on
every layout and in a pass that is repeated for its activations, which are not kept: the backward pass draws it again.
The standard deviations are numbers of the trainer, not weights of the model: no export, server or conversion sees them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_dppo.config.train import LayerNoiseConfig
from megatron_dppo.parallel.context import ContextShard
from megatron_dppo.parallel.groups import ParallelGroups
from megatron_dppo.types import MicroBatch


@dataclass(frozen=True)
class RowNoise:
    """The noise of one packed row of T tokens; drawn when it is asked for."""

    num_tokens: int
    sequences: Sequence[tuple[int, int, str]]
    """start in the row, tokens with noise, and what names the noise of each sequence"""
    shard: ContextShard | None
    """the tokens of context parallelism's rank"""
    part: tuple[int, int]
    """sequence parallelism's rank and size"""

    @classmethod
    def from_batch(cls, batch: MicroBatch, shard: ContextShard | None, part: tuple[int, int], name: str) -> RowNoise:
        """Of a micro-batch in host memory.

        Tokens after the last one of the loss get none: nothing of the loss sees them, and how many there are depends on
        the layout, which pads.
        """
        starts, found = batch.cu_seqlens.tolist(), []
        for start, end in pairwise(starts):
            of_loss = batch.loss_mask[start:end].nonzero()
            length = int(of_loss[-1]) + 1 if len(of_loss) else 0
            tokens = batch.tokens[start : start + length].numpy().tobytes()
            found.append((start, length, f"{name}/{hashlib.sha256(tokens).hexdigest()}"))
        return cls(len(batch.tokens), found, shard, part)

    def draw(self, layer: int, like: Tensor) -> Tensor:
        """Standard normal fp32 of the shape of ``like [local tokens, 1, hidden]``, on its device."""
        row = torch.zeros(self.num_tokens, like.shape[-1], device=like.device)
        generator = torch.Generator(like.device)
        for start, length, name in self.sequences:
            if length:
                digest = hashlib.sha256(f"{name}/{layer}".encode()).digest()
                generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
                row[start : start + length].normal_(generator=generator)
        if self.shard is not None:
            row = self.shard.split(row)
        rank, size = self.part
        return row.chunk(size)[rank].view_as(like)


NoiseFactory = Callable[[MicroBatch, ContextShard | None], RowNoise]
"""The noise of a micro-batch in host memory, of which this rank computes a share."""


class LayerNoise:
    """The noise of one policy, and its standard deviations.

    Args:
        models: the unwrapped chunks of this rank.
        config: theirs.
        settings: of the noise.
        groups: process groups.
        seed: of the run.
        adam: beta 1, beta 2 and epsilon.

    Attributes:
        log_std: ``[layers with noise]`` float64, equal on all ranks.
        gradient: of the loss of the last update with respect to it, over the global token count.
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
        self._layers, self._learn = settings.layers(config.num_layers), settings.learn
        self._world, self._seed = groups.world, seed
        tp = dist.get_world_size(groups.tp)
        self._part = (dist.get_rank(groups.tp), tp) if config.sequence_parallel else (0, 1)
        self._copies = 1 if config.sequence_parallel else tp
        """ranks on which a token's gradient is the same"""
        self.log_std = torch.full((len(self._layers),), math.log(settings.std), dtype=torch.float64)
        self.gradient = torch.zeros_like(self.log_std)
        self._adam = torch.optim.Adam([self.log_std], lr=settings.lr, betas=adam[:2], eps=adam[2])
        self._own: dict[int, Tensor] = {}
        """this stage's, as leaves on the device, which the passes of one update add their gradients to"""
        device = next(models[0].parameters()).device
        for model in models:
            for layer in model.decoder.layers:
                number = layer.layer_number - 1
                if number in self._layers:
                    self._own[number] = torch.zeros((), device=device, requires_grad=settings.learn)
                    layer.register_forward_pre_hook(partial(self._add, number), with_kwargs=True)
        config.finalize_model_grads_func = self._reducing(config.finalize_model_grads_func)

    def for_version(self, policy_version: int) -> NoiseFactory:
        """What gives the micro-batches of this version's update their noise."""
        for number, leaf in self._own.items():
            leaf.grad = None
            leaf.data.fill_(self.log_std[number - self._layers.start])
        return partial(RowNoise.from_batch, part=self._part, name=f"{self._seed}/{policy_version}")

    def _add(self, layer: int, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Forward hook before a layer: its input with noise, in a row that has some."""
        noise: RowNoise | None = getattr(kwargs.get("packed_seq_params"), "noise", None)
        if noise is None:
            return None
        hidden = kwargs["hidden_states"]
        return args, kwargs | {"hidden_states": _Noisy.apply(hidden, self._own[layer], partial(noise.draw, layer))}

    def _reducing(self, finalize: Callable[..., None] | None) -> Callable[..., None]:
        """Megatron's last step of a schedule, and this policy's: gradients of all ranks over the token count."""

        def call(model: Any, num_tokens: Tensor | None = None, **more: Any) -> None:
            assert finalize is not None and num_tokens is not None
            finalize(model, num_tokens, **more)  # which makes num_tokens that of all ranks
            total = torch.zeros(len(self._layers), dtype=torch.float64)  # this group is over the CPU
            found = {number: leaf.grad for number, leaf in self._own.items() if leaf.grad is not None}
            if found:
                rows = torch.tensor(list(found)) - self._layers.start
                total[rows] = torch.stack(list(found.values())).double().cpu()
            dist.all_reduce(total, group=self._world)
            self.gradient = total / (self._copies * max(1, int(num_tokens)))

        return call

    def step(self, loss_scale: float, *, applied: bool) -> dict[str, float]:
        """Follow the gradient of an update that was applied, whose loss was multiplied by ``loss_scale``.

        Returns:
            Mean and largest standard deviation that it had, as metrics.
        """
        std = self.log_std.exp()
        if self._learn and applied:
            self.log_std.grad = self.gradient / loss_scale
            self._adam.step()
        return {"layer_noise": float(std.mean()), "layer_noise_max": float(std.max())}

    def state(self) -> dict[str, Any]:
        """For a checkpoint, as JSON."""
        adam = self._adam.state.get(self.log_std, {})
        return {"log_std": self.log_std.tolist(), "adam": {key: value.tolist() for key, value in adam.items()}}

    def load(self, state: dict[str, Any] | None) -> None:
        """Go on from what ``state`` gave; None = a checkpoint of a run without noise, or with it on other layers."""
        if state is None or len(state["log_std"]) != len(self._layers):
            return
        self.log_std.copy_(torch.tensor(state["log_std"], dtype=torch.float64))
        self._adam.state[self.log_std] = {
            key: torch.tensor(value, dtype=torch.float32 if key == "step" else torch.float64)
            for key, value in state["adam"].items()
        }


class _Noisy(torch.autograd.Function):
    """``hidden + exp(log_std) * noise``; the noise is drawn again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, log_std: Tensor, draw: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.draw, ctx.std = draw, log_std.exp()
        return hidden + (ctx.std * draw(hidden)).to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        gradient = gradients[0]
        if not ctx.needs_input_grad[1]:
            return gradient, None, None
        return gradient, ctx.std * (gradient.float() * ctx.draw(gradient)).sum(), None

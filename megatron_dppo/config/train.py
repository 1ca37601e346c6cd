"""The section ``[train]``."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from megatron_dppo.config.section import Section
from megatron_dppo.config.user_functions import BuiltInAdvantage, check_advantage
from megatron_dppo.errors import ConfigError


class LayerNoiseConfig(Section):
    """Gaussian noise on the input hidden states of each layer (ALP, arXiv 2603.19470).

    Noise is applied in optimizer updates only. pi is then the probability under noise; mu stays the rollout's
    (docs/loss.md).
    """

    std: float = Field(0.0, ge=0)
    """Initial standard deviation of the noise. 0 disables it. The authors of ALP start at 1e-6."""
    learn: bool = True
    """Learn each layer's standard deviation: Adam updates its logarithm with the gradient of the loss."""
    lr: float = Field(5e-4, gt=0)
    """Constant learning rate of these logarithms."""
    start_layer: int = Field(0, ge=0)
    """First layer with noise, counted from 0."""
    end_layer: int | None = Field(None, gt=0)
    """End of the range of layers with noise (exclusive). null includes the last layer."""

    @model_validator(mode="after")
    def _has_effect(self) -> Self:
        changed = self.changed_keys()
        if changed and not self.std:
            key = changed[0]
            raise ValueError(
                f"layer_noise.{key} = {getattr(self, key)!r} has no effect with std = 0; set std, for example to 1e-6"
            )
        if not self.learn and "lr" in changed:
            raise ValueError(
                f"layer_noise.lr = {self.lr!r} has no effect with learn = false; remove it, or set learn = true"
            )
        if self.end_layer is not None and self.end_layer <= self.start_layer:
            raise ValueError(
                f"layer_noise.end_layer = {self.end_layer} is not above start_layer = {self.start_layer}, so that no "
                "layer has noise. end_layer is exclusive: set it above start_layer"
            )
        return self

    def layers(self, num_layers: int) -> range:
        """Return the layers with noise in a model of ``num_layers`` layers."""
        end = num_layers if self.end_layer is None else self.end_layer
        if end > num_layers or self.start_layer >= num_layers:
            raise ConfigError(
                f"train.layer_noise: start_layer = {self.start_layer} and end_layer = {self.end_layer} exceed the "
                f"model's {num_layers} layers. Set start_layer below {num_layers}, and end_layer to at most "
                f"{num_layers} or to null"
            )
        return range(self.start_layer, end)


ROUTER_REPLAY_ALIASES = {"R3": "rollout", "R2": "recorded", "disabled": "off"}
"""Names of the modes in verl and in the papers, mapped to ours."""

ENGINE_REPLAY_MODES = ("rollout", "compare")
"""Modes of ``train.router_replay`` that need the rollout engine's routing."""


RouterReplay = Annotated[
    Literal["off", "rollout", "recorded", "compare"],
    BeforeValidator(lambda value: ROUTER_REPLAY_ALIASES.get(str(value), value)),
]


class TrainConfig(Section):
    """Training on rollouts: updates, advantages, staleness, router replay, safety limits."""

    mini_batches: int = Field(1, ge=1)
    """Optimizer updates per epoch over the rollouts of one step."""
    epochs: int = Field(1, ge=1)
    """Passes over the rollouts of one step."""
    micro_batch_tokens: int = Field(8192, gt=0)
    """Maximum number of tokens in one packed micro-batch. Lower it if the GPU runs out of memory. A longer sample gets
    a micro-batch of its own."""
    balance_ranks: bool = True
    """Assign samples to data-parallel ranks so that the i-th micro-batches of all ranks take about the same time."""
    advantage: BuiltInAdvantage | str = "mean"
    """Advantage estimator. ``mean``: reward minus the group's mean. ``std``: the same, divided by the group's standard
    deviation (GRPO). ``leave_one_out``: reward minus the mean of the other responses (RLOO). ``opo``: reward minus the
    group's mean weighted by lengths (OPO). ``gdpo``: ``std`` of each part of the reward, then the weighted sum (GDPO).
    ``remax``: reward minus that of the greedy response to the same prompt, which costs one more response a prompt
    (ReMax). ``none``: the reward itself. Or a user function, ``path/to/file.py:function`` (docs/loss.md)."""
    advantage_normalization: Literal["none", "batch"] = "none"
    """``batch`` normalizes advantages over all tokens of the step: minus their mean, divided by their standard
    deviation. With ``advantage = "none"`` this is REINFORCE++, with ``mean`` its variant with a baseline."""
    advantage_options: dict[str, object] = Field(default_factory=dict)
    """Keyword arguments of a user function in ``advantage``, in addition to rewards and their validity."""
    mask_truncated: bool = False
    """Exclude responses that were truncated at ``rollout.max_new_tokens`` from the loss (overlong filtering)."""
    max_staleness: int = Field(0, ge=0)
    """Maximum age, in rollout steps, of the weights that sampled a token. 0 is on-policy. Above 0, the next rollouts
    are sampled while the policy trains, and responses of servers continue with the new weights after each sync."""
    router_replay: RouterReplay = "off"
    """Experts that each token visits in training. ``off``: the trainer's own routing. ``rollout``: the rollout engine's
    routing (R3). ``recorded``: the trainer's routing at the start of the step, in all its updates (R2). ``compare``:
    the trainer's own routing, compared with the engine's (``docs/router_replay.md``)."""
    router_replay_weights: bool = False
    """Also replay (or compare) the fp32 combine weights of the experts. The router's gradient passes straight through
    to its own weights. Among the engines, only ``local`` returns them."""
    max_skipped_updates: int = Field(5, ge=1)
    """Stop the run after this many updates in a row with a non-finite gradient."""
    max_first_prob_diff: Annotated[float, Field(gt=0)] | Literal["auto", "off"] = "auto"
    """Stop before the first update of a step if the mean |pi - mu| exceeds this limit, which points to a bug rather
    than to rounding. ``auto``: 0.001 in fp32, 0.015 if engine or training use fp16, 0.06 if one of them uses bf16, 0
    with ``rollout.batch_invariant``, no limit with ``rollout.perturbation``. From the second step on, ``auto`` is also
    five times the median of the run's last steps, for each server, and tokens of older weights have limits, too
    (docs/probe.md). A number is the only limit then, and holds for tokens that the current weights sampled. ``off``
    disables all limits of probabilities."""
    max_nonfinite_fraction: Annotated[float, Field(ge=0, lt=1)] | Literal["off"] = 0.01
    """Stop before the first update of a step if more than this fraction of the sampled tokens has no finite rollout
    log-probability. These tokens are a part of ``rollout/dropped_token_fraction``, which also counts those of failed
    rewards. ``off`` disables the check."""
    sampling_test: bool = True
    """Test that tokens are samples of the policy: by the most probable tokens, equal siblings, and the entropy. A
    server that fails is left out; without another one the run stops. An honest run of 10,000 steps fails with a
    probability of at most 1 % (docs/probe.md)."""
    layer_noise: LayerNoiseConfig = LayerNoiseConfig()

    @property
    def needs_engine_routing(self) -> bool:
        """True if the rollout engine must report the experts that it chose."""
        return self.router_replay in ENGINE_REPLAY_MODES

    @model_validator(mode="after")
    def _advantage_is_known(self) -> Self:
        check_advantage(self.advantage, self.advantage_options)
        return self

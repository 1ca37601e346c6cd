"""``[train]``, ``[warmup]``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from megatron_dppo.config.optimizer import WarmupOptimizerConfig
from megatron_dppo.config.section import Section
from megatron_dppo.config.section import Section as _Section
from megatron_dppo.config.user_functions import BuiltInAdvantage, check_advantage
from megatron_dppo.errors import ConfigError


class LayerNoiseConfig(Section):
    """Adaptive layerwise perturbation (ALP, arXiv 2603.19470): in updates, and only there, each layer's input hidden
    states get Gaussian noise; pi is then the probability under noise, and mu stays the rollout's (docs/loss.md)."""

    std: float = Field(0.0, ge=0)
    """Initial standard deviation; 0 = no noise. Its authors start at 1e-6."""
    learn: bool = True
    """Each layer's standard deviation follows the gradient of the loss, by Adam on its logarithm."""
    lr: float = Field(5e-4, gt=0)
    """Learning rate of these logarithms; constant."""
    start_layer: int = Field(0, ge=0)
    """First layer with noise, counted from 0."""
    end_layer: int | None = Field(None, gt=0)
    """The one after the last layer with noise; None = to the end."""

    @model_validator(mode="after")
    def _has_effect(self) -> LayerNoiseConfig:
        changed = self.changed_keys()
        if changed and not self.std:
            key = changed[0]
            raise ValueError(f"layer_noise.{key} = {getattr(self, key)!r} has no effect with std = 0; set std, as 1e-6")
        if not self.learn and "lr" in changed:
            raise ValueError(f"layer_noise.lr = {self.lr!r} has no effect with learn = false")
        if self.end_layer is not None and self.end_layer <= self.start_layer:
            raise ValueError(
                f"layer_noise.end_layer = {self.end_layer} is not above start_layer = {self.start_layer}: no layer is "
                "left. end_layer is the one after the last"
            )
        return self

    def layers(self, num_layers: int) -> range:
        """Those with noise in a model of ``num_layers``.

        Raises:
            ConfigError: the model has no such layer.
        """
        end = num_layers if self.end_layer is None else self.end_layer
        if end > num_layers or self.start_layer >= num_layers:
            raise ConfigError(
                f"train.layer_noise: start_layer = {self.start_layer} and end_layer = {self.end_layer} of a model with "
                f"{num_layers} layers. Set start_layer below {num_layers}, and end_layer to {num_layers} at most or "
                "not at all"
            )
        return range(self.start_layer, end)


ROUTER_REPLAY_ALIASES = {"R3": "rollout", "R2": "recorded", "disabled": "off"}
"""Their names in verl and the papers."""


ENGINE_REPLAY_MODES = ("rollout", "compare")
"""the values for which the rollout engine reports its routing"""


def _resolve_alias(value: Any) -> Any:
    return ROUTER_REPLAY_ALIASES.get(value, value) if isinstance(value, str) else value


RouterReplay = Annotated[Literal["off", "rollout", "recorded", "compare"], BeforeValidator(_resolve_alias)]


class TrainConfig(_Section):
    """How rollouts become optimizer updates."""

    mini_batches: int = Field(1, ge=1)
    """Optimizer updates per epoch over one batch of rollouts."""
    epochs: int = Field(1, ge=1)
    micro_batch_tokens: int = Field(8192, gt=0)
    """Token budget of one packed micro-batch."""
    balance_ranks: bool = True
    """Move samples between data parallel ranks, so that the i-th micro-batches of all take the same time."""
    advantage: BuiltInAdvantage | str = "mean"
    """Reward minus the group's mean, the same divided by its deviation, reward minus the mean of the others, the reward
    itself (``none``), or a function of your own, ``path/to/file.py:function`` (docs/loss.md)."""
    advantage_normalization: Literal["none", "batch"] = "none"
    """``batch``: advantages minus their mean over all tokens of the step, over their deviation; with ``advantage`` =
    ``none`` this is REINFORCE++, with ``mean`` its variant with a baseline."""
    advantage_options: dict[str, Any] = Field(default_factory=dict)
    """Only a function of your own in ``advantage``: what it gets by name, beside rewards and their validity."""
    mask_truncated: bool = False
    """Leave responses that were cut off at max_new_tokens out of the loss (overlong filtering)."""
    max_staleness: int = Field(0, ge=0)
    """Rollout steps that the weights which sampled a token may be old; above 0 the next rollouts are sampled while the
    policy trains, and those of servers go on with the new weights after each publish. 0 = on-policy."""
    router_replay: RouterReplay = "off"
    """Which experts each token visits in training: ``off`` = the trainer's own choice; ``rollout`` = the rollout
    engine's (R3); ``recorded`` = the trainer's choice at the start of the step, in all its updates (R2); ``compare`` =
    as ``off``, and the engine's are only compared with it (``docs/router_replay.md``)."""
    router_replay_weights: bool = False
    """Also replay (or compare) the fp32 weights with which the experts' outputs are added up; the router's gradient
    passes straight through to its own. Of the engines ``local`` returns them."""
    max_skipped_updates: int = Field(5, ge=1)
    """Stop after this many updates in a row with a non-finite gradient."""
    max_first_prob_diff: Annotated[float, Field(gt=0)] | Literal["auto", "off"] = "auto"
    """Stop before the first update of a step when the mean |pi - mu| is above this; ``auto`` = 0.001 in fp32, 0.06 with
    bf16 in the engine or in training, no limit with ``rollout.perturbation``; ``off`` = never. Only where the current
    weights sampled every token."""
    max_dropped_fraction: Annotated[float, Field(ge=0, lt=1)] | Literal["off"] = 0.01
    """Stop there too when more of the sampled tokens have no finite rollout log-probability; ``off`` = never."""
    layer_noise: LayerNoiseConfig = LayerNoiseConfig()

    @property
    def needs_engine_routing(self) -> bool:
        """Whether the rollout engine has to report which experts it chose."""
        return self.router_replay in ENGINE_REPLAY_MODES

    @model_validator(mode="after")
    def _advantage_is_known(self) -> TrainConfig:
        check_advantage(self.advantage, self.advantage_options)
        return self


class WarmupConfig(_Section):
    """A short supervised phase before RL; 0 steps = none."""

    num_steps: int = Field(0, ge=0)
    data: str = "task:chain_sum"
    """An embedded task (``task:chain_sum``, ``task:rare_words``, ``task:rare_chain``), or a JSONL file with ``prompt``
    and ``response``."""
    batch_size: int = Field(96, gt=0)
    """Sequences per update, over all ranks."""
    optimizer: WarmupOptimizerConfig = WarmupOptimizerConfig()

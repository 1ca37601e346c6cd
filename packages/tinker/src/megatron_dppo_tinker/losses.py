"""Losses of the API: names and configurations of a request as losses of this package, summed over tokens.

    cross_entropy         - sum of  w_t log pi(a_t)
    importance_sampling   - sum of  A_t r_t,                      r_t = pi(a_t) / mu(a_t): ``pg_is``
    ppo                   - sum of  min(A_t r_t, A_t clip(r_t)):  ``ppo_clip``
    cispo                 - sum of  A_t sg(clip(r_t)) log pi(a_t)

mu is the probability that the sampler reported (``logprobs``): the anchor. Nothing is divided by a number of tokens.
Every other loss of ``[loss]`` is served by its own name and keys if it needs nothing more than these inputs, such as
``dppo_binary_tv``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from megatron_dppo.config.loss import LossConfig
from megatron_dppo.config.loss_registry import loss_names
from megatron_dppo.losses import Objective, policy_objective
from megatron_dppo.types import LossInputs, LossOutput, TrainingSample
from megatron_dppo_tinker.errors import RequestError
from megatron_dppo_tinker.wire import Datum

_CLIP_KEYS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
"""Limits of the ratio in ``ppo`` and ``cispo``, with the API's defaults."""
_NOT_SERVED = {
    "dro": "its quadratic penalty is not built",
    "gspo": "its inputs of whole sequences are not built",
    "stable_reinforce": "the sampler records no stability information",
    "custom": "traced losses run in the client: pass a function to forward_backward_custom",
}
_FUNCTION_KEYS = frozenset({"mask", "mask_options"})
"""Keys of ``[loss]`` that name a function of the user."""
_SENT_INPUTS = frozenset({"rollout_logprobs"})
"""Inputs of ``LossInputs``, besides log pi and the advantages, that a request carries."""

_ROUNDING = 1e-5
"""Largest log-probability that is 0 by rounding: a forward pass of the client may be in fp32."""


@dataclass(frozen=True)
class RequestLoss:
    """Loss of a request."""

    objective: Objective
    inputs: tuple[str, ...]
    """Names of the tensors that each datum must have, besides ``target_tokens``."""

    def sample(self, datum: Datum, vocab_size: int, max_tokens: int) -> TrainingSample:
        """Return a datum as a training sample."""
        _check_inputs(datum, self.inputs)
        count = len(datum.tokens)
        if not 1 <= count <= max_tokens:
            raise RequestError(f"a datum has {count} tokens, expected 1 to {max_tokens} (the model's context)")
        labels = datum.loss_inputs["target_tokens"].long()
        for name, ids in (("model_input", datum.tokens), ("target_tokens", labels)):
            if bool(((ids < 0) | (ids >= vocab_size)).any()):
                raise RequestError(f"{name} has ids outside 0 to {vocab_size - 1}")
        # The weights of a cross-entropy stand where the advantages of a policy loss do: both are factors of log pi.
        factor = datum.loss_inputs["weights" if "weights" in self.inputs else "advantages"]
        anchor = datum.loss_inputs.get("logprobs")
        return TrainingSample(
            tokens=datum.tokens,
            labels=labels,
            # Every position: its log-probability is returned, and a factor of 0 leaves it without a gradient.
            loss_mask=torch.ones(count, dtype=torch.bool),
            advantages=factor.float(),
            rollout_logprobs=None if anchor is None else anchor.float(),
        )

    def value(self, sample: TrainingSample, logprobs: Tensor) -> LossOutput:
        """Return the loss of one sample at known log-probabilities [T], without a gradient."""
        inputs = LossInputs(
            logprobs=logprobs,
            advantages=sample.advantages,
            loss_mask=sample.loss_mask,
            rollout_logprobs=sample.rollout_logprobs,
        )
        with torch.no_grad():
            return self.objective.loss(inputs)


def read_loss(name: str, config: Mapping[str, float | str]) -> RequestLoss:
    """Return the loss of a request."""
    if name in _NOT_SERVED:
        raise RequestError(f"loss_fn = {name!r} is not served: {_NOT_SERVED[name]}. Use one of: {_served_names()}")
    if name == "cross_entropy":
        _check_keys(name, config, ())
        objective = Objective(weighted_cross_entropy, by_token=True, skips_zero_advantage=False)
        return RequestLoss(objective, ("weights",))
    # Only built-in names: a path would make the client's text import a file.
    if name not in ("importance_sampling", "ppo", *loss_names()):
        raise RequestError(f"loss_fn = {name!r:.80} is unknown. Use one of: {_served_names()}")
    if functions := sorted(config.keys() & _FUNCTION_KEYS):
        raise RequestError(f"loss_fn_config of {name!r} has {', '.join(functions)}: a client cannot name a function")
    try:
        loss = LossConfig(**_loss_keys(name, config))
    except (ValidationError, ValueError) as error:
        raise RequestError(f"loss_fn_config of {name!r}: {_first_problem(error)}") from error
    statistics = loss.declared_statistics().keys()
    if missing := sorted(loss.required_inputs - _SENT_INPUTS | statistics):
        raise RequestError(f"loss_fn = {name!r} needs {', '.join(missing)}, which a request of this API does not carry")
    if loss.aggregation is not None:
        raise RequestError(f"aggregation = {loss.aggregation!r}: this API sums over tokens. Remove the key")
    objective = policy_objective(loss)
    if objective.needs.entropy_gradient:
        raise RequestError("entropy_coef is not served. Remove the key")
    # A token without an advantage has no gradient, but the client reads its log-probability.
    return RequestLoss(replace(objective, skips_zero_advantage=False), ("logprobs", "advantages"))


def weighted_cross_entropy(inputs: LossInputs) -> LossOutput:
    """Compute the sum of ``- weight * log pi``, with the weights in place of the advantages; any sign is valid."""
    return LossOutput(
        loss_sum=-(inputs.advantages.detach() * inputs.logprobs).sum(),
        num_tokens=inputs.loss_mask.sum(),
        keep_mask=inputs.loss_mask,
        metrics={},
        logprobs=inputs.logprobs.detach(),
    )


def _loss_keys(name: str, config: Mapping[str, float | str]) -> dict[str, Any]:
    """Return the keys of ``[loss]`` for a loss of the API; those of any other loss are its own."""
    if name == "importance_sampling":
        _check_keys(name, config, ())
        return {"name": "pg_is", "form": "ratio"}
    if name not in ("ppo", "cispo"):
        return {**config, "name": name}
    _check_keys(name, config, tuple(_CLIP_KEYS))
    low, high = (config.get(key, default) for key, default in _CLIP_KEYS.items())
    if isinstance(low, str) or isinstance(high, str) or not 0 < low < 1 < high:
        raise RequestError(f"loss_fn_config of {name!r}: expected 0 < clip_low_threshold < 1 < clip_high_threshold")
    if name == "cispo":
        return {"name": "cispo", "ratio_floor": low, "ratio_cap": high}
    return {"name": "ppo_clip", "clip_ratio_low": 1 - low, "clip_ratio_high": high - 1}


def _check_keys(name: str, config: Mapping[str, float | str], known: tuple[str, ...]) -> None:
    if unknown := sorted(config.keys() - set(known)):
        expected = f"expected {', '.join(known)}" if known else "it has none"
        raise RequestError(f"loss_fn_config of {name!r} has the unknown keys {', '.join(unknown)}; {expected}")


def _check_inputs(datum: Datum, names: tuple[str, ...]) -> None:
    expected = {"target_tokens", *names}
    sent = datum.loss_inputs.keys()
    if sent != expected:
        raise RequestError(f"loss_fn_inputs has {sorted(sent)}, expected exactly {sorted(expected)}")
    for name, tensor in datum.loss_inputs.items():
        if tensor.shape != datum.tokens.shape:
            raise RequestError(
                f"loss_fn_inputs {name!r} has the shape {list(tensor.shape)}, expected {list(datum.tokens.shape)}: "
                "one value for each input token"
            )
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise RequestError(f"loss_fn_inputs {name!r} has values that are not finite")
    anchor = datum.loss_inputs.get("logprobs")
    if anchor is not None and bool((anchor > _ROUNDING).any()):
        raise RequestError(
            f"loss_fn_inputs 'logprobs' has {float(anchor.max()):g}: expected log-probabilities, which are at most 0"
        )


def _first_problem(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(error)


def _served_names() -> str:
    return "cross_entropy, importance_sampling, ppo, cispo, dppo_binary_tv, dppo_binary_kl (packages/tinker/README.md)"

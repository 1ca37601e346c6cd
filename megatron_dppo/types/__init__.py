"""The records that flow through one step, each made in one place.

    Prompt -> Completion -> Rollout / RolloutGroup -> TrainingSample -> MicroBatch
           -> LossInputs -> LossOutput -> StepResult

Conventions, fixed here and nowhere else:

- *Alignment.* A sequence of S tokens gives per-token tensors of length T = S - 1. Position ``t`` of each of
  them describes the prediction of ``labels[t] = sequence[t + 1]`` from ``tokens[t] = sequence[t]``.
- *Missing is None.* A field that does not apply is None, never zero.
- *Log-probabilities* are natural logarithms of the distribution that was sampled from (after temperature).
"""

from megatron_dppo.types.loss import (
    NO_NEEDS,
    Divergence,
    LossInputs,
    LossNeeds,
    LossOutput,
    Metric,
    SlotSums,
    StepResult,
)
from megatron_dppo.types.rollouts import (
    Completion,
    FinishReason,
    LeftOut,
    Prompt,
    ResponseColumns,
    Rollout,
    RolloutGroup,
    SamplingMask,
    SamplingParams,
    VersionSpan,
    as_bytes,
    check_sampling_mask,
)
from megatron_dppo.types.routes import MISSING_EXPERT, RoutingShape, experts_of, weights_of, with_weights
from megatron_dppo.types.samples import MicroBatch, MicroBatches, TokenFields, TokenTargets, TrainingSample

__all__ = [
    "MISSING_EXPERT",
    "NO_NEEDS",
    "Completion",
    "Divergence",
    "FinishReason",
    "LeftOut",
    "LossInputs",
    "LossNeeds",
    "LossOutput",
    "Metric",
    "MicroBatch",
    "MicroBatches",
    "Prompt",
    "ResponseColumns",
    "Rollout",
    "RolloutGroup",
    "RoutingShape",
    "SamplingMask",
    "SamplingParams",
    "SlotSums",
    "StepResult",
    "TokenFields",
    "TokenTargets",
    "TrainingSample",
    "VersionSpan",
    "as_bytes",
    "check_sampling_mask",
    "experts_of",
    "weights_of",
    "with_weights",
]

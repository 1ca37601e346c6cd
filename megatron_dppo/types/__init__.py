"""Records that flow through one step. Each is created in one place.

    Prompt -> Completion -> Rollout / RolloutGroup -> TrainingSample -> MicroBatch
           -> LossInputs -> LossOutput -> StepResult

Conventions, defined only here:

- *Alignment.* A sequence of S tokens has per-token tensors of length T = S - 1. Position ``t`` of each
  describes the prediction of ``labels[t] = sequence[t + 1]`` from ``tokens[t] = sequence[t]``.
- *Missing is None.* A field that does not apply is None, never zero.
- *Log-probabilities* are natural logarithms of the distribution that was sampled from (after temperature).
- *Loss mask, sampling mask, masked, kept, anchor*: see ``losses.dppo``.
"""

# mypy: implicit-reexport
# ruff: noqa: F401

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
    DropReason,
    GreedyResponse,
    Prompt,
    PromptLimits,
    Rollout,
    RolloutGroup,
    SegmentCredit,
    ToolTime,
    token_ages,
    version_spans,
)
from megatron_dppo.types.samples import MicroBatch, MicroBatches, TokenFields, TokenTargets, TrainingSample
from megatron_dppo_engines.responses import (
    FinishReason,
    ResponseColumns,
    SamplingMask,
    SamplingParams,
    VersionSpan,
    as_bytes,
    check_sampling_mask,
)
from megatron_dppo_engines.routes import MISSING_EXPERT, RoutingShape, select_experts, select_weights, with_weights

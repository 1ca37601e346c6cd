"""The sections ``[data]``, ``[rollout]`` and ``[reward]``: what is asked, how it is answered and scored."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megatron_dppo.config_section import DType, Section


class DataConfig(Section):
    """Prompts. A source is ``task:chain_sum`` (embedded) or the path of a JSONL file."""

    train: str
    """Prompts that are trained on."""
    eval: str | None = None
    """Held-out prompts; None = no evaluation."""
    prompt_key: str = "prompt"
    """Column with a string, or with a list of chat messages (the tokenizer's chat template is applied)."""
    label_key: str = "label"
    """Column with the reference answer."""
    max_prompt_tokens: int = Field(1024, gt=0)


class RolloutConfig(Section):
    """How samples are drawn."""

    engine: Literal["local"] = "local"
    """``local``: a transformers copy of the policy in the trainer's processes."""
    prompts_per_step: int = Field(gt=0)
    """Prompts of one step, over all ranks."""
    samples_per_prompt: int = Field(gt=1)
    """Size of a group."""
    temperature: float = Field(1.0, gt=0)
    """Divides the logits in sampling and in training."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Only 1 (no filter): training computes the whole distribution, so a filtered rollout would look off-policy."""
    top_k: int = Field(0, ge=0)
    """Only 0 (no filter), for the same reason."""
    max_new_tokens: int = Field(gt=0)
    """Longest response, the end-of-sequence token included."""
    dtype: DType = "bf16"
    """Dtype of the local engine's copy of the weights."""
    return_logprobs: bool = True
    """Rollout log-probabilities: the anchor of every loss."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal (they give no gradient) by new prompts (DAPO)."""
    max_refills: int = Field(3, ge=1)
    """Rounds of replacement in one step; groups without signal that are left after them are kept."""
    oversample: float = Field(1.0, ge=1)
    """Draw this many times the prompts that are needed (rounded up on each rank, also in rounds of replacement), and
    train on the first groups that carry signal."""


class RewardConfig(Section):
    """Verifiable reward."""

    function: str = "math"
    """``math`` (last boxed answer or Answer: line), or ``module:function`` of your own."""
    timeout_seconds: float = Field(10.0, gt=0)
    """Limit for one sample; a slower one is stopped and counted as failed."""
    num_workers: int = Field(1, ge=1)
    """Processes per rank that compute slow rewards."""

"""The sections ``[data]`` and ``[rollout]``: what is asked, and how it is answered."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from megatron_dppo.config.perturbation import PerturbationConfig
from megatron_dppo.config.section import DType, Section
from megatron_dppo.config.servers import ServersConfig, WeightSyncConfig


class DataConfig(Section):
    """Prompts. A source is an embedded task (``task:chain_sum``, ``task:rare_words``, ``task:rare_chain``),
    ``task:reasoning_gym:NAME``, a JSONL or Parquet file, or ``hf:owner/name`` (``docs/data.md``)."""

    train: str | list[str]
    """Prompts that are trained on: one source, or several, one after the other."""
    eval: str | dict[str, str] | None = None
    """Held-out prompts: one source, or a table name = source (each also reported as ``eval/<name>/accuracy``); None =
    no evaluation."""
    prompt_key: str | None = None
    """Column with a string or a list of chat messages (``a.b`` = field ``b`` of column ``a``); None = recognised."""
    label_key: str | None = None
    """Column with the reference answer, likewise; None = recognised; ``""`` = there are no labels."""
    deduplicate: str = "auto"
    """Keep the first row of each problem, told by ``auto`` (same prompt or ``extra_info.index``), ``prompt``, a column;
    ``off`` = keep all."""
    apply_chat_template: bool | None = None
    """None = messages and bare problems go through the tokenizer's template, a string under ``prompt`` is taken as it
    stands; true = strings do too, as one user message; false = nothing does."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template, for example ``enable_thinking = false``."""
    system_prompt: str | None = None
    """System message for prompts that have none (needs a chat template)."""
    max_prompt_tokens: int = Field(1024, gt=0)
    """Longest prompt, chat template included."""
    overlong_prompts: Literal["error", "drop", "truncate_left"] = "error"
    """What becomes of a longer prompt; ``truncate_left`` keeps its last tokens. Those dropped or cut are counted at the
    start."""

    @field_validator("train")
    @classmethod
    def _has_a_source(cls, value: str | list[str]) -> str | list[str]:
        if not value:
            raise ValueError("name at least one source")
        return value

    @field_validator("eval")
    @classmethod
    def _sets_have_names(cls, value: str | dict[str, str] | None) -> str | dict[str, str] | None:
        names = list(value) if isinstance(value, dict) else ["one"]
        if not names:
            raise ValueError("an empty table has no set; leave data.eval out for no evaluation")
        if bad := [name for name in names if not re.fullmatch(r"[A-Za-z0-9_.-]+", name)]:
            raise ValueError(f"the name {bad[0]!r} becomes part of a metric; use letters, digits, '_', '.' and '-'")
        return value


MOST_KEPT = 4096
"""Of SGLang's ``--sampling-mask-max-tokens``, at its default; vLLM has no limit of its own."""


class RolloutConfig(Section):
    """How samples are drawn."""

    engine: Literal["local", "sglang", "vllm"] = "local"
    """``local``: a transformers copy of the policy in the trainer's processes; the others: servers over HTTP."""
    servers: ServersConfig = ServersConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    sglang: dict[str, Any] = Field(default_factory=dict)
    """Arguments of each SGLang server that ``megatron-dppo serve`` starts, e.g. ``tp-size = 2``."""
    vllm: dict[str, Any] = Field(default_factory=dict)
    """Arguments of each vLLM server, likewise."""
    perturbation: PerturbationConfig = PerturbationConfig()
    prompts_per_step: int = Field(gt=0)
    """Prompts of one step, over all ranks."""
    samples_per_prompt: int = Field(gt=1)
    """Size of a group."""
    temperature: float = Field(1.0, gt=0)
    """Divides the logits in sampling and in training."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample among the most probable tokens that hold this mass together; 1 = all. With a filter the ids that it left
    are recorded for each token, and training's distributions are those over them (``docs/rollout.md``)."""
    top_k: int = Field(0, ge=0)
    """Sample among the so many most probable tokens; 0 = all."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Sample among the tokens that have at least this share of the largest probability; 0 = all."""
    max_new_tokens: int = Field(gt=0)
    """Longest response, the end-of-sequence token included."""
    dtype: DType = "bf16"
    """Dtype of the engine's copy of the weights."""
    batch_invariant: bool = False
    """``local`` without a copy: sample with the trainer's own model, all ranks together, by kernels that give a token
    the same bits in any batch. What is reported equals what training computes exactly. CPU only, and slow: each token
    reads its whole sequence again (``docs/diagnose.md``)."""
    return_logprobs: bool = True
    """Rollout log-probabilities: the anchor of every loss."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal (they give no gradient) by new prompts (DAPO)."""
    max_refills: int = Field(3, ge=1)
    """Rounds of replacement in one step; groups without signal that are left after them are kept."""
    oversample: float = Field(1.0, ge=1)
    """Draw this many times the prompts that are needed (rounded up on each rank, also in rounds of replacement), and
    train on the first groups that carry signal."""
    abort_slowest: bool = False
    """With oversample: stop the responses that are not complete when enough groups are."""
    partial_rollouts: int = Field(0, ge=0)
    """Rollout steps that a group which was stopped so is carried on, with new weights; 0 = it is thrown away."""
    order: Literal["stream", "completed"] = "stream"
    """Which groups a step trains on: those of the next prompts, or those that are complete first (a group waits for one
    step at most). ``completed`` is for servers with train.max_staleness of 2 or more, and trains short answers sooner
    (``docs/rollout.md``)."""
    generate: str | None = None
    """``module:function`` or ``path/to/file.py:function`` that makes a response of several turns, as with tools
    (``docs/engines.md``); None = one turn."""

    @property
    def filters(self) -> bool:
        """Whether some tokens may never be sampled."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @model_validator(mode="after")
    def _filters_can_be_recorded(self) -> RolloutConfig:
        if self.top_k == 1:
            raise ValueError(
                "top_k = 1: every token is then the only one that can be sampled, so none has a gradient; use 0 (all), "
                "or at least 2"
            )
        if self.filters and self.engine != "local" and not 1 < self.top_k <= MOST_KEPT:
            raise ValueError(
                f"top_p = {self.top_p}, top_k = {self.top_k}, min_p = {self.min_p} with engine = {self.engine!r}: "
                "training needs the ids that the filters left of each token, and servers report them only where top_k "
                f"bounds their number. Set top_k from 2 to {MOST_KEPT} (the largest cuts next to nothing), or use "
                "top_p = 1, top_k = 0 and min_p = 0"
            )
        return self

    @model_validator(mode="after")
    def _rules_of_the_stream_fit(self) -> RolloutConfig:
        if self.abort_slowest and self.oversample == 1:
            raise ValueError(
                "abort_slowest = true has no effect with oversample = 1: every group is needed. Set oversample above 1"
            )
        if self.partial_rollouts and not self.abort_slowest:
            raise ValueError(
                f"partial_rollouts = {self.partial_rollouts} has no effect without abort_slowest = true: no response "
                "is stopped"
            )
        if self.order == "completed" and self.engine == "local":
            raise ValueError(
                "order = 'completed' needs inference servers: the local engine samples whole batches, so that a run "
                "repeats bit for bit. Set engine to 'sglang' or 'vllm', or order = 'stream'"
            )
        if self.order == "completed" and self.abort_slowest:
            raise ValueError(
                "order = 'completed' with abort_slowest = true: a step that takes what is complete first waits for no "
                "slow group that could be stopped. Choose one of them"
            )
        return self

    @model_validator(mode="after")
    def _weights_reach_the_servers(self) -> RolloutConfig:
        if self.servers.colocated and self.weight_sync.method == "distributed":
            raise ValueError(
                "servers.colocated = true with weight_sync.method = 'distributed': NCCL refuses two processes on one "
                "GPU. Set it to 'ipc' (the servers open the trainer's memory), or to 'disk' (weight_sync.folder in "
                "/dev/shm keeps it in memory)"
            )
        if self.servers.colocated and self.weight_sync.method == "adapter":
            raise ValueError(
                "servers.colocated = true with weight_sync.method = 'adapter': servers that release their memory lose "
                "the base model, which is not sent again. Set it to 'ipc' or 'disk'"
            )
        return self

    @model_validator(mode="after")
    def _quantised_weights_go_by_disk(self) -> RolloutConfig:
        model, method = self.servers.model, self.weight_sync.method
        if model is not None and method != "disk":
            raise ValueError(
                f"servers.model = {model!r} with weight_sync.method = {method!r}: quantised weights reach servers as a "
                "folder, which they read as they did the one that they started with; set it to 'disk'"
            )
        if model is not None and self.dtype == "fp32":
            raise ValueError(
                f"servers.model = {model!r} with dtype = 'fp32': no engine computes with quantised weights in fp32; "
                "set dtype to 'bf16' or 'fp16'"
            )
        return self

    @property
    def coarseness(self) -> DType:
        """The dtype whose rounding is like what the engine's probabilities differ by; that of quantised weights is
        bounded as bf16's."""
        return self.dtype if self.servers.model is None else "bf16"

    @model_validator(mode="after")
    def _sections_belong_to_the_engine(self) -> RolloutConfig:
        changed = self.changed()
        for section, engines in _ENGINES_OF_SECTIONS.items():
            if self.engine not in engines and section in changed:
                raise ValueError(
                    f"[rollout.{section}] has no effect with rollout.engine = {self.engine!r}; set it to "
                    f"{' or '.join(map(repr, engines))}, or remove the section"
                )
        return self


_ENGINES_OF_SECTIONS = {
    "servers": ("sglang", "vllm"),
    "weight_sync": ("sglang", "vllm"),
    "sglang": ("sglang",),
    "vllm": ("vllm",),
    "perturbation": ("local",),
}

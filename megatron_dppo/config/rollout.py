"""``[rollout]``, ``[agent]``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from megatron_dppo.config.section import DType, Section
from megatron_dppo.config.servers import ServersConfig, WeightSyncConfig

if TYPE_CHECKING:
    pass


class AgentConfig(Section):
    """An agent that plays each episode (one sample of one prompt) against the policy (docs/agents.md)."""

    command: list[str] | None = None
    """The program and its arguments, started once an episode with ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY`` in the
    environment and the task as JSON on its standard input; None = no agent, or ``function``."""
    function: str | None = None
    """``module:function`` or ``path/to/file.py:function`` instead of a program: called with the task in the trainer's
    process, ``async`` or in a thread."""
    reward: Literal["function", "call", "exit"] = "function"
    """Where rewards come from. ``function``: [reward], where the agent has not called ``POST /v1/reward``; ``call``:
    that call, and an episode without one has failed; ``exit``: 1 where the program ends with status 0, else 0, or the
    number that the function returns."""
    timeout_seconds: float = Field(300.0, gt=0)
    """Of an episode, without what it waits for the policy; then the program is killed, and the sample has failed."""
    max_calls: int = Field(50, gt=0)
    """Calls of an episode; further ones are refused, and the episode counts as cut off."""
    max_running: int | None = Field(None, gt=0)
    """Episodes at the same time on one data-parallel rank, with servers; None = all that are sampled."""
    host: str = "127.0.0.1"
    """Address that the endpoint listens at, and is named by: another one only for agents outside of this machine."""
    max_body_bytes: int = Field(4_194_304, gt=0)
    """Longest body of a call."""

    @property
    def is_set(self) -> bool:
        """Whether there is an agent."""
        return self.command is not None or self.function is not None

    @model_validator(mode="after")
    def _is_one(self) -> AgentConfig:
        if self.command is not None and self.function is not None:
            raise ValueError("agent.command and agent.function are both set; choose one of them")
        if self.command is not None and not (self.command and self.command[0]):
            raise ValueError(f"agent.command = {self.command!r} names no program; e.g. ['python', 'my_agent.py']")
        changed = self.changed_keys()
        if changed and not self.is_set:
            raise ValueError(
                f"agent.{changed[0]} = {getattr(self, changed[0])!r} has no effect without an agent; set "
                "agent.command or agent.function"
            )
        return self


class PerturbationConfig(Section):
    """A known difference between the local engine and the policy, for experiments with trust regions
    (``docs/experiments.md``); the engine's dtype is ``rollout.dtype``, and old weights are ``train.max_staleness``.
    Evaluation samples with the perturbed engine too."""

    weights: Literal["none", "fp8", "int8", "int4"] = "none"
    """Round the engine's copy of the linear weights at each publish, by nvidia-modelopt's fake quantizers (the extra
    ``[modelopt]``): FP8 with a scale a tensor, INT8 a channel, INT4 a block of 128. Embedding, output layer and routers
    stay as they are."""
    router_noise: float = Field(0.0, ge=0)
    """Standard deviation of Gaussian noise on the logits of the engine's routers, new for each token that is read; the
    same in each run of one seed."""
    unrecorded_top_p: float = Field(1.0, gt=0, le=1)
    """Draw from the most probable tokens up to this mass, but report log-probabilities of the whole distribution, which
    training takes as they are: an engine that hides its filter. Not for temperature 0."""

    @property
    def is_active(self) -> bool:
        """Whether anything is changed."""
        return self != type(self)()


MAX_ALLOWED_TOKENS = 4096
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
    def has_filters(self) -> bool:
        """Whether some tokens may never be sampled."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @model_validator(mode="after")
    def _filters_can_be_recorded(self) -> RolloutConfig:
        if self.top_k == 1:
            raise ValueError(
                "top_k = 1: every token is then the only one that can be sampled, so none has a gradient; use 0 (all), "
                "or at least 2"
            )
        if self.has_filters and self.engine != "local" and not 1 < self.top_k <= MAX_ALLOWED_TOKENS:
            raise ValueError(
                f"top_p = {self.top_p}, top_k = {self.top_k}, min_p = {self.min_p} with engine = {self.engine!r}: "
                "training needs the ids that the filters left of each token, and servers report them only where top_k "
                f"bounds their number. Set top_k from 2 to {MAX_ALLOWED_TOKENS} (the largest cuts next to nothing), "
                "or use top_p = 1, top_k = 0 and min_p = 0"
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
    def rounding_dtype(self) -> DType:
        """The dtype whose rounding is like what the engine's probabilities differ by; that of quantised weights is
        bounded as bf16's."""
        return self.dtype if self.servers.model is None else "bf16"

    @model_validator(mode="after")
    def _sections_belong_to_the_engine(self) -> RolloutConfig:
        changed = self.changed_keys()
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

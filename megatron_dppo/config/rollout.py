"""The sections ``[rollout]`` and ``[agent]``."""

import re
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from megatron_dppo.config.container import CONTAINER_TOOLS, ENDPOINT_NETWORK, ContainerConfig
from megatron_dppo.config.section import ContainerTool, DType, Section
from megatron_dppo.config.servers import ServersConfig, WeightSyncConfig


class AgentConfig(Section):
    """An agent program that runs each episode (one sample of one prompt) with the policy (docs/agents.md)."""

    command: list[str] | None = None
    """Program and arguments, started once per episode. ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY`` are in its
    environment, and the same with ``ANTHROPIC_``. The task is JSON on its standard input, with ``base_url`` and
    ``api_key``. null starts no program."""
    function: str | None = None
    """Python function instead of a program: ``module:function`` or ``path/to/file.py:function``. It runs in the
    trainer's process with the task as its argument, as a coroutine (``async``) or in a thread. null calls no
    function."""
    environment: str | None = None
    """Environment of the package verifiers 0.4 that plays the episodes, instead of a program: ``verifiers:TASKSET``
    with the id of a taskset. ``megatron-dppo tasks`` writes its tasks as data. null uses none."""
    environment_python: str | None = None
    """Python interpreter of an environment in which verifiers and the taskset are installed."""
    environment_options: dict[str, object] = Field(default_factory=dict)
    """Further fields of the environment's configuration, such as ``{agent = {harness = {id = "null"}}}``. Its agents
    run in ``{type = "subprocess"}`` unless you set their ``runtime``."""
    untrained_agents: list[str] = Field(default_factory=list)
    """Names of agents of the environment whose responses are left out of training, besides those that the environment
    itself leaves out."""
    untrained_prompts: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Texts of calls that are left out of training, such as the greeting with which a program tests its model. One in
    a message of a conversation's first call leaves out all of the conversation."""
    reward: Literal["function", "call", "exit", "environment"] = "function"
    """Source of the rewards. ``function``: the run's ``[reward]``. With the others the agent gives its own reward.
    ``call``: by ``POST /v1/reward``; an episode without one counts as failed. ``exit``: 1 if the program exits with
    status 0, otherwise 0; or the number that the function returns. ``environment``: that of ``agent.environment``, the
    default with one."""
    max_failed_fraction: float = Field(0.1, ge=0, le=1)
    """Largest fraction of a step's episodes that may fail, over all ranks. A step with more stops the run after a save.
    A single failed episode never does. 1 allows all failures but 64 in a row."""
    pass_env: list[str] = Field(default_factory=list)
    """Names of environment variables that a program gets from the trainer, besides those of paths, language and
    certificates (docs/agents.md). A program could send any of them elsewhere."""
    isolation: Literal["landlock", "namespace", "none"] | ContainerTool = "landlock"
    """``landlock``: a program can neither read environment and memory of processes other than its children, such as
    other agents and the trainer, nor signal them. It needs Linux 5.13. ``namespace``: besides, it sees its own
    processes alone, and all of them end with it. ``none``: nothing of this, and no API key in the environment: programs
    read ``api_key`` from the task. ``podman``, ``docker`` and ``apptainer``: a container for each episode
    (``[agent.container]``)."""
    container: ContainerConfig = ContainerConfig()
    max_memory_gb: float | None = Field(None, gt=0)
    """Maximum address space in GiB of a program and of each process that it starts. For a container its memory. null
    sets no limit."""
    max_cpu_seconds: int | None = Field(None, gt=0)
    """Maximum CPU time in seconds of a program and of each process that it starts, which is then killed. null sets no
    limit. Not with apptainer."""
    timeout_seconds: float = Field(300.0, gt=0)
    """Time limit of an episode in seconds, without the time it waits for the policy. After that the program is killed
    and the sample counts as failed."""
    max_calls: int = Field(50, gt=0)
    """Maximum number of model calls per episode. Further calls are refused, and the episode counts as truncated."""
    segments: Literal["all", "longest"] = "all"
    """Segments of an episode that are trained on, if its calls form several conversations (docs/agents.md). ``all``:
    each is a training sample with the advantage of the episode. ``longest``: only the one with the most sampled
    tokens."""
    segment_weight: Literal["tokens", "segments"] = "tokens"
    """Weight of an episode's segments in the gradient. The episode keeps its total weight in any case: it is one
    sequence for ``loss.aggregation``. ``tokens``: all of its tokens weigh alike. ``segments``: each of K segments has
    1/K of the weight, however long it is."""
    max_segments: int | None = Field(None, gt=0)
    """Maximum number of conversations per episode. A call that would begin one more is refused, and the episode counts
    as truncated. null: no limit but ``max_calls``."""
    credit: Literal["episode", "turn", "agent"] = "episode"
    """Credit for rewards. ``episode``: each token gets that of the episode. ``turn``: each token gets the rewards that
    the agent gives to single responses (``POST /v1/reward`` with an id) from its own response on (return-to-go).
    ``agent``: each token gets the reward of its own agent in an environment of several, relative to the same agent in
    the group's other episodes."""
    max_running: int | None = Field(None, gt=0)
    """Maximum number of concurrent episodes per data-parallel rank. Only with inference servers. null sets no limit."""
    host: str = "127.0.0.1"
    """Address on which the endpoint listens, and which agents use. Change it only if agents run on another machine."""
    format: Literal[
        "auto",
        "hermes",
        "qwen3_xml",
        "glm",
        "deepseek",
        "deepseek_xml",
        "kimi",
        "minimax",
        "llama",
        "mistral",
        "gpt_oss",
        "none",
    ] = "auto"
    """Form of thoughts and tool calls in responses. ``auto`` chooses it by the chat template of the model's folder.
    ``none`` reads no tool calls, and calls with ``tools`` are refused."""
    renderer: str | None = None
    """Read responses with a renderer of the package ``renderers`` (extra ``[agents]``) instead of ``format``, such as
    ``qwen3.5``. Prompts stay those of the model's chat template. null reads them in ``format``."""
    separate_reasoning: bool = True
    """Return the thoughts of a response as ``reasoning_content``, as inference servers do. false leaves them in
    ``content``, with their tags. Programs may send them back in either field, or not at all."""
    max_body_bytes: int = Field(4_194_304, gt=0)
    """Maximum size of a request body in bytes."""

    @property
    def is_set(self) -> bool:
        """True if the run has an agent."""
        return any(each is not None for each in (self.command, self.function, self.environment))

    @model_validator(mode="before")
    @classmethod
    def _environment_gives_rewards(cls, values: object) -> object:
        if isinstance(values, dict) and values.get("environment") is not None:
            return {"reward": "environment", **values}
        return values

    @model_validator(mode="after")
    def _environment_is_complete(self) -> Self:
        if self.environment is None:
            if self.reward == "environment":
                raise ValueError("agent.reward = 'environment' without agent.environment; set it, or another reward")
            names = ("environment_python", "environment_options", "untrained_agents")
            settings = [key for key in names if key in self.changed_keys()]
            if settings and self.is_set:
                raise ValueError(f"agent.{settings[0]} has no effect without agent.environment; remove it")
            return self
        if not re.fullmatch(r"verifiers:[^:]+", self.environment):
            raise ValueError(
                f"agent.environment = {self.environment!r}, expected 'verifiers:TASKSET' with the id of a taskset"
            )
        if self.environment_python is None:
            raise ValueError(
                "agent.environment needs agent.environment_python, the interpreter of an environment with verifiers "
                "and the taskset, such as '/opt/verifiers/bin/python'"
            )
        if self.reward in ("call", "exit"):
            raise ValueError(
                f"agent.reward = {self.reward!r} with agent.environment: an environment gives its own reward. Set "
                "'environment', or 'function' for that of [reward]"
            )
        taskset = self.environment_options.get("taskset")
        if isinstance(taskset, dict) and "id" in taskset:
            raise ValueError("agent.environment_options has 'taskset.id', which agent.environment names; remove it")
        return self

    @model_validator(mode="after")
    def _limits_have_a_program(self) -> Self:
        for name in ("max_memory_gb", "max_cpu_seconds"):
            if getattr(self, name) is not None and (self.isolation == "none" or self.function is not None):
                reason = "agent.function runs in the trainer" if self.function is not None else "isolation = 'none'"
                raise ValueError(
                    f"agent.{name} = {getattr(self, name)} has no effect: {reason}. Remove it, or use agent.command "
                    "with agent.isolation = 'landlock' or 'namespace'"
                )
        return self

    @model_validator(mode="after")
    def _container_is_complete(self) -> Self:
        container, changed = self.container, self.container.changed_keys()
        setting = f"agent.isolation = {self.isolation!r}"
        if self.isolation not in CONTAINER_TOOLS:
            if changed:
                raise ValueError(
                    f"agent.container.{changed[0]} has no effect with {setting}; set agent.isolation to 'podman', "
                    "'docker' or 'apptainer', or remove it"
                )
            return self
        if self.function is not None or self.environment is not None:
            raise ValueError(
                f"{setting} needs agent.command: a function runs in the trainer, and an environment of verifiers "
                "starts containers by its environment_options.agent.runtime. Remove agent.isolation"
            )
        if container.image is None and container.image_column is None:
            raise ValueError(f"{setting} without an image; set agent.container.image or agent.container.image_column")
        if self.isolation == "docker" and container.network == ENDPOINT_NETWORK:
            raise ValueError(
                f"{setting} with agent.container.network = 'endpoint', which only podman has. Set it to 'host', or to "
                "an internal network of docker, and agent.host to that network's gateway (docs/agents.md)"
            )
        if self.isolation == "apptainer":
            if container.network != "host":
                raise ValueError(
                    f"{setting} with agent.container.network = {container.network!r}: its programs use the network of "
                    "the trainer. Set it to 'host', or use podman"
                )
            if "user" in changed or self.max_cpu_seconds is not None:
                name = "container.user" if "user" in changed else "max_cpu_seconds"
                raise ValueError(f"agent.{name} with {setting}, which cannot set it; remove it")
        return self

    @model_validator(mode="after")
    def _has_one_agent(self) -> Self:
        agents = [name for name in ("command", "function", "environment") if getattr(self, name) is not None]
        if len(agents) > 1:
            raise ValueError(f"agent.{agents[0]} and agent.{agents[1]} are both set; remove one of them")
        if self.command is not None and not (self.command and self.command[0]):
            raise ValueError(
                f"agent.command = {self.command!r} names no program; set it, for example, to ['python', 'my_agent.py']"
            )
        if self.renderer is not None and self.format != "auto":
            raise ValueError(
                f"agent.format = {self.format!r} and agent.renderer = {self.renderer!r} both read the responses; "
                "remove one of them"
            )
        changed = self.changed_keys()
        if changed and not self.is_set:
            raise ValueError(
                f"agent.{changed[0]} = {getattr(self, changed[0])!r} has no effect without an agent; set "
                "agent.command, agent.function or agent.environment"
            )
        return self


class PerturbationConfig(Section):
    """A controlled difference between the local engine and the policy, for experiments with trust regions.

    See ``docs/experiments.md``. The engine's dtype is ``rollout.dtype``, and old weights are ``train.max_staleness``.
    Evaluation samples with the perturbed engine too.
    """

    weights: Literal["none", "fp8", "int8", "int4"] = "none"
    """Round the linear weights of the engine's copy at each sync, with nvidia-modelopt's fake quantizers (extra
    ``[modelopt]``). FP8 has one scale per tensor, INT8 one per channel, INT4 one per block of 128. Embedding, output
    layer and routers keep their precision."""
    router_noise: float = Field(0.0, ge=0)
    """Standard deviation of Gaussian noise on the engine's router logits. It is drawn anew for each token that is read,
    and is the same in each run with one seed."""
    unrecorded_top_p: float = Field(1.0, gt=0, le=1)
    """Apply this top-p filter in sampling, but report log-probabilities of the full distribution, as an engine that
    hides its filter would. It has no effect at temperature 0."""
    unrecorded_temperature: float = Field(1.0, gt=0)
    """Draw tokens at ``temperature`` times this value, but report log-probabilities at ``temperature``, as an engine
    with another temperature than it was asked for would. It has no effect at temperature 0."""
    state_dtype: Literal["fp32", "bf16"] = "fp32"
    """Data type of the recurrent states of linear attention in the engine. Servers can hold them in bf16 (SGLang:
    ``--mamba-ssm-dtype``, vLLM: ``--mamba-ssm-cache-dtype``)."""

    @property
    def is_active(self) -> bool:
        """True if any perturbation is set."""
        return self != type(self)()


MAX_ALLOWED_TOKENS = 4096
"""Default of SGLang's ``--sampling-mask-max-tokens``. vLLM has no such limit."""


class RolloutConfig(Section):
    """Sampling of responses."""

    engine: Literal["local", "sglang", "vllm"] = "local"
    """Rollout engine. ``local``: a transformers copy of the policy in the trainer's processes. The others are servers
    over HTTP."""
    servers: ServersConfig = ServersConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    sglang: dict[str, object] = Field(default_factory=dict)
    """Arguments of each SGLang server that ``megatron-dppo serve`` starts, for example ``tp-size = 2``."""
    vllm: dict[str, object] = Field(default_factory=dict)
    """Arguments of each vLLM server that ``megatron-dppo serve`` starts, for example ``tensor-parallel-size = 2``."""
    perturbation: PerturbationConfig = PerturbationConfig()
    prompts_per_step: int = Field(gt=0)
    """Prompts per rollout step, over all ranks."""
    samples_per_prompt: int = Field(gt=1)
    """Responses sampled for each prompt (group size)."""
    temperature: float = Field(1.0, gt=0)
    """Temperature. It divides the logits in sampling and in training."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the most probable tokens whose total probability reaches this value. 1 disables the filter. With any
    filter, the allowed token ids are recorded for each token, and training normalizes over them
    (``docs/rollout.md``)."""
    top_k: int = Field(0, ge=0)
    """Sample from this many most probable tokens. 0 disables the filter. Servers need it together with any other
    filter."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Sample from the tokens whose probability is at least this fraction of the largest one. 0 disables the filter."""
    max_new_tokens: int = Field(gt=0)
    """Maximum response length in tokens, including the end-of-sequence token."""
    dtype: DType = "bf16"
    """Data type of the engine's copy of the weights."""
    batch_invariant: bool = False
    """Sample with the trainer's own model instead of a copy, on all ranks together, with kernels whose result does not
    depend on the batch. The reported log-probabilities then equal the trained ones exactly. Only ``engine = "local"``
    on the CPU. It is slow: each token reads its whole sequence again (``docs/diagnose.md``)."""
    return_logprobs: bool = True
    """Record the log-probabilities of the rollout. Every loss compares the policy with them."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal, which give no gradient, with new prompts (DAPO)."""
    max_refills: int = Field(3, ge=1)
    """Maximum rounds of replacement per step. Groups that still have equal rewards after them are kept."""
    oversample: float = Field(1.0, ge=1)
    """Sample this many times the needed prompts, and train on the first groups whose rewards differ. The number is
    rounded up on each rank, also in rounds of replacement."""
    abort_slowest: bool = False
    """With ``oversample`` above 1: abort unfinished responses once enough groups are complete."""
    partial_rollouts: int = Field(0, ge=0)
    """Rollout steps for which an aborted group is continued with newer weights. 0 discards it."""
    order: Literal["stream", "completed"] = "stream"
    """Groups that a step trains on. ``stream``: the groups of the next prompts. ``completed``: the groups that complete
    first; a group waits for at most one step. ``completed`` needs servers and ``train.max_staleness`` of at least 2,
    and trains short responses earlier (``docs/rollout.md``)."""
    generate: str | None = None
    """User function for responses of several turns, for example with tools: ``module:function`` or
    ``path/to/file.py:function`` (``docs/engines.md``). null samples one turn."""

    @property
    def has_filters(self) -> bool:
        """True if top-p, top-k or min-p excludes tokens from sampling."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @model_validator(mode="after")
    def _filters_can_be_recorded(self) -> Self:
        if self.top_k == 1:
            raise ValueError(
                "top_k = 1 allows only one token at each position, so that no token has a gradient; use 0 (all "
                "tokens), or at least 2"
            )
        if self.has_filters and self.engine != "local" and not 1 < self.top_k <= MAX_ALLOWED_TOKENS:
            raise ValueError(
                f"top_p = {self.top_p}, top_k = {self.top_k}, min_p = {self.min_p} with engine = {self.engine!r}: "
                "training needs the token ids that the filters allow, and servers return them only if top_k bounds "
                f"their number. Set top_k between 2 and {MAX_ALLOWED_TOKENS} (the maximum excludes almost nothing), "
                "or use top_p = 1, top_k = 0 and min_p = 0"
            )
        return self

    @model_validator(mode="after")
    def _stream_options_are_compatible(self) -> Self:
        if self.abort_slowest and self.oversample == 1:
            raise ValueError(
                "abort_slowest = true has no effect with oversample = 1, where every group is needed; set "
                "oversample above 1"
            )
        if self.partial_rollouts and not self.abort_slowest:
            raise ValueError(
                f"partial_rollouts = {self.partial_rollouts} has no effect without abort_slowest = true, because no "
                "response is aborted; set abort_slowest = true, or remove partial_rollouts"
            )
        if self.order == "completed" and self.engine == "local":
            raise ValueError(
                "order = 'completed' needs inference servers: the local engine samples whole batches, so that a run "
                "is reproducible bit for bit. Set engine to 'sglang' or 'vllm', or order = 'stream'"
            )
        if self.order == "completed" and self.abort_slowest:
            raise ValueError(
                "order = 'completed' with abort_slowest = true: a step that trains on completed groups never waits "
                "for a slow one that could be aborted. Remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _sync_method_fits_the_servers(self) -> Self:
        if self.servers.colocated and self.weight_sync.method == "distributed":
            raise ValueError(
                "servers.colocated = true with weight_sync.method = 'distributed': NCCL refuses two processes on "
                "one GPU. Set method to 'ipc' (the servers map the trainer's memory), or to 'disk' (with "
                "weight_sync.folder in /dev/shm it stays in memory)"
            )
        if self.servers.colocated and self.weight_sync.method == "adapter":
            raise ValueError(
                "servers.colocated = true with weight_sync.method = 'adapter': servers that release their memory "
                "lose the base model, which is not sent again. Set method to 'ipc' or 'disk'"
            )
        model, method = self.servers.model, self.weight_sync.method
        if model is not None and method != "disk":
            raise ValueError(
                f"servers.model = {model!r} with weight_sync.method = {method!r}: quantized weights reach servers "
                "only as a folder that they load as at their start; set method to 'disk'"
            )
        if model is not None and self.dtype == "fp32":
            raise ValueError(
                f"servers.model = {model!r} with dtype = 'fp32': no engine computes with quantized weights in fp32; "
                "set dtype to 'bf16' or 'fp16'"
            )
        return self

    @property
    def rounding_dtype(self) -> DType:
        """Dtype whose rounding bounds the error of the engine's probabilities; bf16 for quantized weights."""
        return self.dtype if self.servers.model is None else "bf16"

    @model_validator(mode="after")
    def _sections_belong_to_the_engine(self) -> Self:
        changed = self.changed_keys()
        for section, engines in _SECTION_ENGINES.items():
            if self.engine not in engines and section in changed:
                raise ValueError(
                    f"[rollout.{section}] has no effect with rollout.engine = {self.engine!r}; set engine to "
                    f"{' or '.join(map(repr, engines))}, or remove the section"
                )
        return self


_SECTION_ENGINES = {
    "servers": ("sglang", "vllm"),
    "weight_sync": ("sglang", "vllm"),
    "sglang": ("sglang",),
    "vllm": ("vllm",),
    "perturbation": ("local",),
}
"""Sections of ``[rollout]`` and the engines that read them."""

"""The sections ``[rollout.servers]`` and ``[rollout.weight_sync]``: inference servers, and how they get new weights."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from megatron_dppo.config.section import Section

WeightSyncMethod = Literal["distributed", "ipc", "disk", "tensor", "adapter"]


class ServersConfig(Section):
    """Where the servers of ``rollout.engine`` are, and how they are asked."""

    urls: list[str] = Field(default_factory=list)
    """``http://HOST:PORT`` of each running server; empty = those that ``megatron-dppo serve`` starts by this file."""
    model: str | None = None
    """A quantised copy of model.path, as ``megatron-dppo convert quantize`` writes one, that the servers start with;
    each version is quantised as that folder's config.json says (``weight_sync.method = "disk"``,
    ``docs/precision.md``). None = model.path."""
    host: str = "127.0.0.1"
    """Where ``megatron-dppo serve`` starts servers."""
    port: int = Field(30000, gt=0, lt=65536)
    """Port of the first one; the next ones follow."""
    count: int = Field(1, ge=1)
    """Servers that ``megatron-dppo serve`` starts."""
    command: list[str] = Field(default_factory=list)
    """How it starts one, before the arguments; empty = the engine's own module with this Python."""
    api_key_env: str | None = None
    """Environment variable with the servers' API key."""
    admin_api_key_env: str | None = None
    """Environment variable with the key of their control calls, where it is another one."""
    colocated: bool = False
    """The servers are on the trainer's GPUs: they release their memory before each update, and the trainer moves its
    weights and optimizer state to the host while they sample (``docs/engines.md``)."""
    max_in_flight: int = Field(256, gt=0)
    """Requests that one data-parallel rank has under way at a time."""
    answer_processes: int = Field(1, ge=0)
    """Processes of each data-parallel rank that read and check the servers' answers; 0 = the trainer does it itself."""
    timeout_seconds: float = Field(3600.0, gt=0)
    """Limit of one response, the time in the server's queue included."""
    health_seconds: float = Field(5.0, gt=0)
    """Seconds between health checks while responses are awaited."""
    patience_seconds: float = Field(60.0, ge=0)
    """How long requests wait for servers that are overloaded or fail, when no other server gives good answers; and how
    long a weight sync waits for one that is being started again, when no other server answers."""

    @property
    def resolved_urls(self) -> list[str]:
        """The servers of the run."""
        return self.urls or [f"http://{self.host}:{self.port + i}" for i in range(self.count)]

    @model_validator(mode="after")
    def _urls_are_different(self) -> ServersConfig:
        if len({url.rstrip("/") for url in self.urls}) < len(self.urls):
            raise ValueError(f"urls = {self.urls} names a server twice; each would get its work and weights twice")
        if self.port + self.count > 65536:
            raise ValueError(f"port = {self.port} and count = {self.count}: ports end at 65535")
        return self


class WeightSyncConfig(Section):
    """How the servers get each new version of the weights (``docs/engines.md``)."""

    method: WeightSyncMethod = "distributed"
    """``distributed``: broadcast over NCCL, or gloo without GPUs; ``ipc``: servers open the trainer's memory, on its
    GPUs (``servers.colocated``) or its CPU; ``disk``: a folder that trainer and servers share; ``tensor``: by value
    over HTTP, for small models on one machine; ``adapter``: only the adapters of ``[lora]``, in such a folder, which
    the servers add to the base model that they started with (``docs/lora.md``)."""
    bucket_megabytes: int = Field(512, gt=0)
    """Weights that are sent together; a tensor that is larger goes alone. Rank 0 holds two of them, with ``ipc`` each
    rank on a server's GPU."""
    host: str = "127.0.0.1"
    """Address of rank 0 as the servers reach it (``distributed``)."""
    folder: str | None = None
    """Where ``disk`` and ``adapter`` write; None = ``weights`` in run.output_dir."""
    checksum_every: int = Field(1, ge=0)
    """Syncs between proofs that each server holds what it was sent, tensor by tensor; 0 = never. With ``adapter``
    once for each server: that it has the base model."""
    probe_every: int = Field(1, ge=0)
    """Syncs between probes, in which the trainer recomputes a response's log-probabilities; 0 = only the first one."""
    timeout_seconds: float = Field(300.0, gt=0)
    """Limit of one call that moves weights, and of the wait for all servers to join."""
    attempts: int = Field(3, ge=1)
    """Tries of one sync before the run stops."""

    @model_validator(mode="after")
    def _folder_is_for_disk(self) -> WeightSyncConfig:
        if self.folder is not None and self.method not in ("disk", "adapter"):
            raise ValueError(f"folder = {self.folder!r} has no effect with method = {self.method!r}; remove it")
        return self

"""The sections ``[rollout.servers]`` and ``[rollout.weight_sync]``: inference servers and their weight updates."""

from typing import Self

from pydantic import Field, model_validator

from megatron_dppo.config.section import Section
from megatron_dppo_engines.serving import WeightSyncMethod


class ServersConfig(Section):
    """Addresses and limits of the inference servers of ``rollout.engine``."""

    urls: list[str] = Field(default_factory=list)
    """Addresses of running servers, ``http://HOST:PORT``. An empty list means the servers that ``megatron-dppo serve``
    starts from this file."""
    model: str | None = None
    """Quantized copy of ``model.path`` that the servers start with, written by ``megatron-dppo convert quantize``. Each
    new version is quantized as that folder's config.json specifies, and sent with ``weight_sync.method = "disk"``
    (``docs/precision.md``). null uses ``model.path``."""
    host: str = "127.0.0.1"
    """Address on which ``megatron-dppo serve`` starts servers."""
    port: int = Field(30000, gt=0, lt=65536)
    """Port of the first server; the others use the following ports."""
    count: int = Field(1, ge=1)
    """Number of servers that ``megatron-dppo serve`` starts."""
    command: list[str] = Field(default_factory=list)
    """Command that starts a server; the arguments are appended. An empty list uses the engine's own module with the
    current Python."""
    api_key_env: str | None = None
    """Environment variable with the API key of the servers. null sends no key."""
    admin_api_key_env: str | None = None
    """Environment variable with the key of their control calls, if it differs. null uses the key in ``api_key_env``."""
    colocated: bool = False
    """The servers share the trainer's GPUs. They release their memory before each update, and the trainer moves its
    weights and optimizer state to the host while they sample (``docs/engines.md``)."""
    max_in_flight: int | None = Field(None, gt=0)
    """Maximum number of requests in flight per data-parallel rank. null means the rank's samples of a step, at most 512
    for each server."""
    client_processes: int = Field(1, ge=0)
    """Processes per data-parallel rank that read and check the servers' responses. 0 reads them in the trainer
    itself."""
    timeout_seconds: float = Field(3600.0, gt=0)
    """Time limit in seconds for one response, including its time in the server's queue."""
    health_seconds: float = Field(5.0, gt=0)
    """Seconds between health checks while responses are pending."""
    unavailable_timeout_seconds: float = Field(60.0, ge=0)
    """Seconds to wait if no server is usable: requests wait for overloaded or failing servers, and a weight sync waits
    for servers that restart. After that the run ends."""

    @property
    def resolved_urls(self) -> list[str]:
        """URLs of the run's servers."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self.urls or [f"http://{host}:{self.port + i}" for i in range(self.count)]

    @model_validator(mode="after")
    def _urls_are_different(self) -> Self:
        if len({url.rstrip("/") for url in self.urls}) < len(self.urls):
            raise ValueError(
                f"urls = {self.urls} lists a server twice, which would then get requests and weights "
                "twice; remove the duplicate"
            )
        if self.port + self.count > 65536:
            raise ValueError(
                f"port = {self.port} and count = {self.count} exceed the highest port, 65535; lower one of them"
            )
        return self


class WeightSyncConfig(Section):
    """Transfer of each new version of the weights to the servers (``docs/engines.md``)."""

    method: WeightSyncMethod = "distributed"
    """Transport. ``distributed``: broadcast over NCCL, or gloo without GPUs. ``ipc``: servers map the trainer's memory,
    on its GPUs (``servers.colocated``) or its CPU. ``disk``: a folder that trainer and servers share. ``adapter``: only
    the adapters of ``[lora]``, in a shared folder; the servers add them to the base model that they started with
    (``docs/lora.md``)."""
    bucket_megabytes: int = Field(512, gt=0)
    """Size of a transfer bucket in megabytes. A larger tensor is sent alone. Rank 0 holds two buckets; with ``ipc``
    each rank on a server's GPU does."""
    host: str = "127.0.0.1"
    """Address of rank 0 as the servers reach it (``distributed``)."""
    folder: str | None = None
    """Folder that ``disk`` and ``adapter`` write. null uses ``weights`` in ``run.output_dir``."""
    checksum_every: int = Field(1, ge=0)
    """Syncs from one proof to the next that each server holds exactly the tensors that were sent. In between, a random
    eighth of the tensors is checked, and all tensors of the servers are compared with each other. 0 disables both. With
    ``adapter``, each server's base model is checked once."""
    probe_every: int = Field(1, ge=0)
    """Syncs between probes, in which the trainer recomputes the log-probabilities of one response. 0 probes only after
    the first sync."""
    timeout_seconds: float = Field(300.0, gt=0)
    """Time limit in seconds for one call that transfers weights, and for all servers to join."""
    attempts: int = Field(3, ge=1)
    """Attempts of one sync before the run stops."""

    @model_validator(mode="after")
    def _folder_is_for_disk(self) -> Self:
        if self.folder is not None and self.method not in ("disk", "adapter"):
            raise ValueError(f"folder = {self.folder!r} has no effect with method = {self.method!r}; remove it")
        return self

"""The ``[distillation]`` section: a teacher that scores the student's own responses."""

from typing import Literal, Self

from pydantic import Field, model_validator

from megatron_dppo.config.section import Section

DivergenceName = Literal["sampled", "reverse_kl", "forward_kl"]

_SERVER_KEYS = (
    "teacher_urls",
    "teacher_engine",
    "teacher_api_key_env",
    "teacher_timeout_seconds",
    "teacher_max_in_flight",
)


class DistillationConfig(Section):
    """On-policy distillation (docs/distillation.md)."""

    teacher_path: str | None = None
    """Hugging Face folder of the teacher, loaded in the trainer. It needs the policy's vocabulary and tokenizer; its
    size must fit the parallel layout. null loads no teacher in the trainer."""
    teacher_offload: Literal["model", "layer"] = "model"
    """Unit that moves between host memory and the GPU. ``model``: all weights are on the GPU while the teacher scores
    responses. ``layer``: only the embeddings, the output layer and one layer are, and the layers are copied again for
    every micro-batch."""
    teacher_urls: list[str] = Field(default_factory=list)
    """Instead of ``teacher_path``: addresses (``http://HOST:PORT``) of running servers with the teacher's weights. They
    take turns to return the log-probabilities of the sampled tokens. Only with ``divergence = "sampled"``."""
    teacher_engine: Literal["sglang", "vllm"] = "sglang"
    """Engine of the servers in ``teacher_urls``."""
    teacher_api_key_env: str | None = None
    """Environment variable with the API key of these servers. null sends no key."""
    teacher_timeout_seconds: float = Field(600.0, gt=0)
    """Time limit in seconds for one response of a teacher server, including its time in the queue."""
    teacher_max_in_flight: int = Field(64, ge=1)
    """Maximum number of teacher requests in flight per data-parallel rank."""
    divergence: DivergenceName = "sampled"
    """Divergence between policy and teacher. ``sampled`` subtracts log mu - log teacher of the sampled token from its
    advantage. The others sum over the full vocabulary and are a term of the loss: ``reverse_kl`` is KL(policy ||
    teacher), ``forward_kl`` is KL(teacher || policy)."""
    coef: float = Field(1.0, gt=0)
    """Weight of the divergence."""
    task_reward: bool = True
    """Train on the task reward as well. false only logs and evaluates rewards: all advantages are 0, except for what
    ``divergence = "sampled"`` adds."""

    @property
    def is_enabled(self) -> bool:
        """True if the run has a teacher."""
        return self.teacher_path is not None or bool(self.teacher_urls)

    @property
    def is_exact(self) -> bool:
        """True if the divergence sums over the full vocabulary."""
        return self.is_enabled and self.divergence != "sampled"

    @model_validator(mode="after")
    def _has_effect(self) -> Self:
        changed = self.changed_keys()
        if changed and not self.is_enabled:
            raise ValueError(
                f"{changed[0]} = {getattr(self, changed[0])!r} has no effect without a teacher; set teacher_path or "
                "teacher_urls"
            )
        if self.teacher_path is not None and (server_keys := [name for name in changed if name in _SERVER_KEYS]):
            raise ValueError(
                f"{server_keys[0]} = {getattr(self, server_keys[0])!r} applies to teacher servers, but teacher_path "
                f"= {self.teacher_path!r} loads the teacher in the trainer; remove one of them"
            )
        if self.teacher_urls and self.teacher_offload != "model":
            raise ValueError("teacher_offload = 'layer' has no effect with teacher_urls; remove it")
        if self.teacher_urls and self.divergence != "sampled":
            raise ValueError(
                f"divergence = {self.divergence!r} with teacher_urls: servers return the log-probabilities of the "
                "sampled tokens only, not of the full vocabulary. Use divergence = 'sampled', or teacher_path"
            )
        return self

"""The ``[distillation]`` section: a teacher that looks at the student's own responses."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from megatron_dppo.config.section import Section

DivergenceName = Literal["sampled", "reverse_kl", "forward_kl"]


_OF_SERVERS = (
    "teacher_urls",
    "teacher_engine",
    "teacher_api_key_env",
    "teacher_timeout_seconds",
    "teacher_max_in_flight",
)


class DistillationConfig(Section):
    """On-policy distillation (docs/distillation.md)."""

    teacher_path: str | None = None
    """Hugging Face folder of the teacher, of any size that the layout divides, with the policy's vocabulary and
    tokenizer; None = there is none in the trainer."""
    teacher_weights: Literal["whole", "by_layer"] = "whole"
    """What of ``teacher_path`` is on the GPU while it looks at the responses: all of its weights, or embeddings, output
    layer and one layer at a time, which are copied there again for every micro-batch."""
    teacher_urls: list[str] = Field(default_factory=list)
    """In place of it ``http://HOST:PORT`` of running servers with the teacher's weights, asked in turn for the
    log-probabilities of the sampled tokens; only with ``sampled``."""
    teacher_engine: Literal["sglang", "vllm"] = "sglang"
    """What those servers are."""
    teacher_api_key_env: str | None = None
    """Environment variable with their API key."""
    teacher_timeout_seconds: float = Field(600.0, gt=0)
    """Limit of one of their answers, the time in the queue included."""
    teacher_max_in_flight: int = Field(64, ge=1)
    """Requests that one data-parallel rank has under way at a time."""
    divergence: DivergenceName = "sampled"
    """``sampled``: log mu - log teacher of the sampled token is taken from its advantage. Or over the whole vocabulary,
    as a term of the loss: ``reverse_kl`` is KL(policy || teacher), ``forward_kl`` KL(teacher || policy)."""
    coef: float = Field(1.0, gt=0)
    """What the divergence is multiplied by."""
    task_reward: bool = True
    """False = rewards are only logged and evaluated: all advantages are 0 but for what ``sampled`` makes of them."""

    @property
    def is_enabled(self) -> bool:
        """Whether there is a teacher."""
        return self.teacher_path is not None or bool(self.teacher_urls)

    @property
    def is_exact(self) -> bool:
        """Whether the divergence is over the whole vocabulary."""
        return self.is_enabled and self.divergence != "sampled"

    @model_validator(mode="after")
    def _has_effect(self) -> DistillationConfig:
        changed = self.changed_keys()
        if changed and not self.is_enabled:
            raise ValueError(
                f"{changed[0]} = {getattr(self, changed[0])!r} has no effect without a teacher; set teacher_path or "
                "teacher_urls"
            )
        if self.teacher_path is not None and (of_servers := [name for name in changed if name in _OF_SERVERS]):
            raise ValueError(
                f"{of_servers[0]} = {getattr(self, of_servers[0])!r} belongs to a teacher behind servers, and "
                f"teacher_path = {self.teacher_path!r} is one in the trainer; remove one of them"
            )
        if self.teacher_urls and self.teacher_weights != "whole":
            raise ValueError("teacher_weights = 'by_layer' has no effect on teacher_urls; remove it")
        if self.teacher_urls and self.divergence != "sampled":
            raise ValueError(
                f"divergence = {self.divergence!r} with teacher_urls: servers tell the log-probabilities of the "
                "sampled tokens, not those of the whole vocabulary. Use divergence = 'sampled', or teacher_path"
            )
        return self

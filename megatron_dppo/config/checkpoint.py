"""The section ``[checkpoint]``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from megatron_dppo.config.section import Section


class CheckpointConfig(Section):
    """Megatron torch_dist checkpoints under ``output_dir/checkpoints``."""

    save_every: int | None = Field(None, ge=0)
    """Steps between checkpoints; None or 0 = only the last. SIGTERM always saves."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints that stay on disk."""
    keep_best: bool = False
    """Also save at every new best ``eval/accuracy``, and keep that checkpoint (``checkpoints/best.json`` names it)."""
    async_save: bool = False
    """Write checkpoints while training goes on: what a rank writes is copied to host memory first (14 bytes a parameter
    of the model over the number of ranks, with bf16 weights). Each save waits for the one before; the run's end for the
    last."""
    resume: Literal["auto", "never"] = "auto"
    """``auto``: continue from the newest whole checkpoint of finite weights in output_dir, if there is one."""
    fork_from: str | None = None
    """Begin this run as another one was at a step: the folder of a checkpoint (``RUN/checkpoints/step_000020``).
    Settings may differ; each change is printed. With checkpoints of its own the run continues from those."""
    accept_changes: bool = False
    """Continue although keys that change the results differ from those of the run so far; each one is printed."""
    accept_unverified: bool = False
    """Continue also from a checkpoint without manifest, as older versions wrote them: nothing shows that its files are
    whole (``docs/checkpoints.md``)."""
    export_hf: bool = True
    """Write the final weights as a Hugging Face folder."""

    @model_validator(mode="after")
    def _a_fork_goes_on(self) -> CheckpointConfig:
        if self.fork_from is not None and self.resume == "never":
            raise ValueError(
                f"fork_from = {self.fork_from!r} with resume = 'never': a fork continues from its own checkpoints when "
                "it is started again; leave resume at 'auto'"
            )
        return self

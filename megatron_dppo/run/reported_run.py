"""A run's folder as the report needs it."""

from __future__ import annotations

from pathlib import Path

from megatron_dppo.data.chat import load_tokenizer, token_texts
from megatron_dppo.errors import ConfigError, UserError
from megatron_dppo.report.page.build import ReportedRun
from megatron_dppo.report.steps.files import recorded_steps
from megatron_dppo.report.steps.tokens import Decode
from megatron_dppo.run.starts import load_run_config


def open_run(folder: Path, name: str = "") -> ReportedRun:
    """Return a run for the report.

    Args:
        folder: Output folder of the run.
        name: Name on the page. Empty uses the name of the folder.

    Raises:
        ConfigError: No such folder.
    """
    if not folder.is_dir():
        raise ConfigError(f"{str(folder)!r} is not a folder; expected the folder of a run (run.output_dir)")
    return ReportedRun(folder, _decoder(folder), name)


def _decoder(folder: Path) -> Decode | None:
    """Return a function from token ids to texts. None without rollouts, and with a note without a tokenizer."""
    if not recorded_steps(folder):
        return None
    try:
        tokenizer = load_tokenizer(load_run_config(folder, []).model.path)
    except UserError as error:
        print(f"note     tokens are shown as ids: {error}", flush=True)
        return None
    return lambda ids: token_texts(tokenizer, ids)

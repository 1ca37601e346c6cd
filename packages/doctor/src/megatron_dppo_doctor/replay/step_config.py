"""The configuration that a recorded step was trained with."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from megatron_dppo.config.io import dump_toml, load_config, validate
from megatron_dppo.config.schema import Config
from megatron_dppo.config.user_functions import functions_as_text
from megatron_dppo.errors import ConfigError
from megatron_dppo.setup.starts import CONFIG, STARTS, load_run_config, read_starts


def load_config_of_step(folder: Path, step: int, overrides: Sequence[str]) -> Config:
    """Return the configuration that a step of a run was trained with: that of the last start before the step."""
    load_run_config(folder, ())  # raises if this is not the folder of a run
    before = [start for start in read_starts(folder) if (start.get("resumed_step") or 0) < step]
    if not before:
        raise ConfigError(f"{folder / STARTS} has no start of the run before step {step}")
    start = before[-1]
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / CONFIG
        with functions_as_text():
            recorded = validate(start.get("config", {}), str(folder / STARTS))
        file.write_text(dump_toml(recorded), encoding="utf-8")
        all_overrides = [*overrides, "--run.output_dir", str(folder)]
        try:
            return load_config(file, all_overrides, relative_to=Path(start.get("cwd", ".")))
        except ConfigError as error:
            raise ConfigError(str(error).replace(str(file), str(folder / CONFIG))) from error

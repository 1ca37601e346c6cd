"""The package that perturbs the local engine for experiments: an entry point, as for agents."""

from __future__ import annotations

from typing import cast

from megatron_dppo.config.rollout import PerturbationConfig
from megatron_dppo.engines.local.perturbation import Perturbation
from megatron_dppo.errors import ConfigError
from megatron_dppo.functions.packages import INSTALL, installed, load

GROUP = "megatron_dppo.perturbations"


def open_perturbation(config: PerturbationConfig) -> Perturbation | None:
    """Return the perturbation of ``[rollout.perturbation]``; None if no key is set.

    Raises:
        ConfigError: No package has the entry point ``perturbation``, or it cannot be imported.
    """
    if not config.is_active:
        return None
    points = installed(GROUP)
    if "perturbation" not in points:
        raise ConfigError(
            f"[rollout.perturbation] needs a package with the entry point perturbation of {GROUP}, got "
            f"{', '.join(points) or 'none'}. Fix: {INSTALL}"
        )
    return cast(Perturbation, load(points["perturbation"])(**config.model_dump()))

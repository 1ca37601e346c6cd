"""``train.router_replay``: its values and names, and what its weights need."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

ROUTER_REPLAY_ALIASES = {"R3": "rollout", "R2": "recorded", "disabled": "off"}
"""Their names in verl and the papers."""
FROM_ENGINE = ("rollout", "compare")
"""the values for which the rollout engine reports its routing"""


def _resolve_alias(value: Any) -> Any:
    return ROUTER_REPLAY_ALIASES.get(value, value) if isinstance(value, str) else value


RouterReplay = Annotated[Literal["off", "rollout", "recorded", "compare"], BeforeValidator(_resolve_alias)]

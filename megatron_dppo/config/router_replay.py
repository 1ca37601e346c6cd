"""``train.router_replay``: its values and names, and what its weights need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

ROUTER_REPLAY_ALIASES = {"R3": "rollout", "R2": "recorded", "disabled": "off"}
"""Their names in verl and the papers."""
FROM_ENGINE = ("rollout", "compare")
"""the values for which the rollout engine reports its routing"""


def _resolve_alias(value: Any) -> Any:
    return ROUTER_REPLAY_ALIASES.get(value, value) if isinstance(value, str) else value


RouterReplay = Annotated[Literal["off", "rollout", "recorded", "compare"], BeforeValidator(_resolve_alias)]


def check_router_weights(replay: str, engine: str, transformer: Mapping[str, Any]) -> None:
    """Whether there are combine weights to replay, and they mean the same on both sides.

    Args:
        replay: ``train.router_replay``.
        engine: ``rollout.engine``.
        transformer: ``model.transformer``.

    Raises:
        ValueError: ``train.router_replay_weights = true`` does not go with one of them.
    """
    key = "train.router_replay_weights = true"
    if replay == "off":
        raise ValueError(
            f"{key} has no effect with train.router_replay = 'off'; set router_replay to 'rollout', 'recorded' or "
            "'compare', or leave router_replay_weights out"
        )
    if replay not in FROM_ENGINE:
        return
    if engine != "local":
        raise ValueError(
            f"{key} with rollout.engine = {engine!r}: neither SGLang (0.5.23) nor vLLM (0.32.0) returns the routers' "
            "weights, only which experts they chose. Set it to false, or use rollout.engine = 'local' or "
            "train.router_replay = 'recorded'"
        )
    for name in ("moe_router_topk_scaling_factor", "moe_router_score_function"):
        if transformer.get(name) is not None:
            raise ValueError(
                f"model.transformer.{name} = {transformer[name]!r} with {key}: it changes the trainer's weights of "
                "experts, but not those of the engine, which would replace them; remove one of them"
            )

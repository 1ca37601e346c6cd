"""The package that runs the agents of ``[agent]``: an entry point, so that the trainer does not depend on it."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, cast

from megatron_dppo.config.rollout import AgentConfig
from megatron_dppo.functions.packages import load_only
from megatron_dppo.rollout.turns import Turns
from megatron_dppo.types import Completion, Prompt

GROUP = "megatron_dppo.agents"


class OpenAgents(Protocol):
    """Generate function that runs episodes of an agent, until it is closed."""

    def __call__(self, prompt: Prompt, turns: Turns, /) -> Awaitable[Completion]:
        """Run an episode."""

    def close(self) -> None:
        """End all programs of agents."""


class AgentPackage(Protocol):
    """Interface of the module that the entry point ``agent`` names."""

    def AgentFunction(
        self,
        config: AgentConfig,
        variables: Mapping[str, Any],
        now: Callable[[], datetime],
        /,
        *,
        part_weights: Mapping[str, float],
        run_folder: Path,
    ) -> OpenAgents:
        """Start what episodes need."""

    def choose_image(self, config: AgentConfig, metadata: Mapping[str, Any], /) -> str:
        """Return the image of the container for a data row."""

    def check_images(self, config: AgentConfig, images: Sequence[str], /) -> None:
        """Check that images exist on this machine."""


def load_agent_package() -> AgentPackage:
    """Import the package that runs agents."""
    return cast(AgentPackage, load_only(GROUP, "agent", "[agent]"))

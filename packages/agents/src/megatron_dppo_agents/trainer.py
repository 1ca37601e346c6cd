"""Names that the trainer uses, by the entry point ``agent`` of the group ``megatron_dppo.agents``."""

from megatron_dppo_agents.containers import check_images, choose_image
from megatron_dppo_agents.generate import AgentFunction

__all__ = ["AgentFunction", "check_images", "choose_image"]

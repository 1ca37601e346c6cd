"""Rewards of an episode, of single responses, and of the runs of an environment's agents."""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from megatron_dppo_agents.conversations import Conversation
from megatron_dppo_agents.named_rewards import NamedRewards


class AgentRun(NamedTuple):
    """Part that an agent of an environment has in an episode."""

    session: str
    """``X-Session-ID`` of its calls."""
    agent: str
    is_trained: bool
    """False if its responses are left out of training."""
    reward: float


class EpisodeRewards:
    """Rewards of one episode. A later reward of the episode or of a response replaces the one before."""

    def __init__(self, names: NamedRewards) -> None:
        self.parts: dict[str, float] = {}
        """Parts of the episode's reward, if the agent gives them."""
        self._names = names
        self.episode: float | None = None
        self.by_response: dict[int, float] = {}
        """Reward of each response, by ``TurnSpan.order``."""

    @property
    def total(self) -> float | None:
        """Sum of the rewards of the episode and of single responses. None: the agent sent none."""
        if self.episode is None and not self.by_response:
            return None
        return (self.episode or 0.0) + sum(self.by_response.values())

    def set_parts(self, parts: Mapping[str, float]) -> None:
        """Set the reward of the episode to the weighted sum of its parts."""
        self.parts = dict(parts)
        self.episode = self._names.total(parts)

    def past_rewards(self, conversation: Conversation) -> torch.Tensor:
        """Return the sum of the rewards of responses before that of each token. Shape [num_tokens]."""
        past = torch.zeros(conversation.branch.position)
        for turn in conversation.turns:
            earlier = (value for order, value in self.by_response.items() if order < turn.order)
            past[turn.start : turn.end] = sum(earlier)
        return past

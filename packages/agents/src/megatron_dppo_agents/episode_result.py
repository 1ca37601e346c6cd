"""The end of an episode: which of its segments train, and what is counted."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from megatron_dppo_agents.conversations import Conversation, ForkReason


@dataclass
class CallCounts:
    """Calls of an episode."""

    admitted: int = 0
    answered: int = 0
    repeated: int = 0
    malformed: int = 0
    """Malformed tool calls in the responses."""
    token_counts: int = 0
    """Requests that counted tokens."""
    ignored: Counter[str] = field(default_factory=Counter)
    """Settings that were ignored, by name."""
    forks: Counter[ForkReason] = field(default_factory=Counter)

    def metrics(self) -> dict[str, float]:
        """Return the counts by the names of their metrics."""
        return {
            "agent/calls": self.answered,
            "agent/repeated_calls": self.repeated,
            "agent/rejected_calls": self.admitted - self.answered - self.repeated,
            "agent/malformed_calls": self.malformed,
            **{f"agent/forks/{reason}": self.forks[reason] for reason in ForkReason},
            "agent/ignored_settings": self.ignored.total(),
            **{f"agent/ignored/{name}": number for name, number in self.ignored.items()},
        }


class SegmentChoice(NamedTuple):
    """Conversations that train, and sampled tokens of the others."""

    trained: list[Conversation]
    left_out: int
    """Tokens that the agent has left out of training."""
    shorter: int
    """Tokens of all but the longest conversation, if it trains alone."""


def choose_segments(conversations: Sequence[Conversation], segments: Literal["all", "longest"]) -> SegmentChoice:
    """Return the conversations that train; none if the agent has left all of them out."""
    trained = [each for each in conversations if each.is_trained and not each.is_left_out]
    left_out = _num_sampled(each for each in conversations if each not in trained)
    if segments == "all" or not trained:
        return SegmentChoice(trained, left_out, 0)
    # Reversed, so that of equally long conversations the newest is trained on.
    longest = max(reversed(trained), key=lambda conversation: conversation.num_sampled)
    return SegmentChoice([longest], left_out, _num_sampled(trained) - longest.num_sampled)


def token_metrics(
    conversations: Sequence[Conversation], choice: SegmentChoice, interrupted: int, dropped: Mapping[str, int]
) -> dict[str, float]:
    """Return the numbers of sequences and segments, and the shares of the sampled tokens that do not train."""
    untrained = {
        "left_out": choice.left_out,
        "shorter": choice.shorter,
        "interrupted": interrupted,
        **dropped,
    }
    sampled = _num_sampled(conversations) + interrupted + sum(dropped.values())
    return {
        "agent/sequences": len(conversations),
        "agent/segments": len(choice.trained),
        "agent/untrained_fraction": sum(untrained.values()) / sampled,
        **{f"agent/untrained/{reason}": tokens / sampled for reason, tokens in untrained.items()},
    }


def _num_sampled(conversations: Iterable[Conversation]) -> int:
    return sum(each.num_sampled for each in conversations)

r"""What is added to a score: a bonus for the form of the answer, a punishment for running into the length limit."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dppo.rewards.item import RewardItem
from megatron_dppo.rewards.math import is_well_formed


def overlong_punishment(length: int, longest: int, buffer: int) -> float:
    """DAPO's soft overlong punishment, from 0 to -1 (arXiv 2503.14476, equation 13).

    Args:
        length: tokens of the response.
        longest: the hard limit L_max.
        buffer: L_cache; within the last ``buffer`` tokens the punishment grows linearly.
    """
    return min(0.0, max(-1.0, (longest - buffer - length) / buffer))


@dataclass(frozen=True, kw_only=True)
class Shaping:
    """The shaping of ``[reward]``; each part that is on is logged under its name."""

    max_new_tokens: int = 0
    format: float = 0.0
    overlong_buffer_tokens: int = 0
    overlong_penalty: float = 1.0

    def parts(self, item: RewardItem) -> dict[str, float]:
        """The addends for one response, by name; empty when all shaping is off."""
        result = {}
        if self.format:
            good = not item.truncated and is_well_formed(item.completion)
            result["format"] = self.format if good else 0.0
        if self.overlong_buffer_tokens:
            share = overlong_punishment(len(item.token_ids), self.max_new_tokens, self.overlong_buffer_tokens)
            result["overlong"] = self.overlong_penalty * share
        return result

"""Rewards that an agent gives by name: ``{"rewards": {"format": 1, "answer": 0}}``, with weights of the run."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_dppo.rollout.turns import check_reward


@dataclass(frozen=True)
class NamedRewards:
    """The parts that a reward has."""

    weights: Mapping[str, float] = field(default_factory=dict)
    """``reward.agent_parts``: weight of each part. Empty: a reward is one number."""

    @property
    def form(self) -> str:
        """The form in which an agent gives its reward."""
        if not self.weights:
            return '{"reward": NUMBER}'
        return '{"rewards": {' + ", ".join(f'"{name}": NUMBER' for name in self.weights) + "}}"

    def read(self, values: object) -> dict[str, float]:
        """Return the parts of a reward, in the order of the weights; ``ValueError`` for any other ones."""
        if not isinstance(values, Mapping):
            raise ValueError(f"'rewards' = {values!r:.80}, expected an object: {self.form}")
        names = list(map(str, values))
        if not self.weights:
            example = ", ".join(f"{name} = 1.0" for name in names) or "answer = 1.0"
            raise ValueError(
                f"'rewards' by name ({', '.join(names):.200}) need weights. Set reward.agent_parts = {{{example:.99}}} "
                f"or give the sum: {self.form}"
            )
        known = ", ".join(self.weights)
        for name in self.weights:
            if name not in values:
                raise ValueError(
                    f"'rewards' = {dict(values)!r:.200} lack {name!r}; give a number for each part of "
                    f"reward.agent_parts ({known})"
                )
        for name in names:
            if name not in self.weights:
                raise ValueError(
                    f"'rewards' have the part {name!r:.80}, which reward.agent_parts ({known}) lacks; add it there "
                    "(weight 0 only logs it), or leave it out"
                )
        return {name: _number(name, values[name]) for name in self.weights}

    def total(self, parts: Mapping[str, float]) -> float:
        """Return the weighted sum of the parts."""
        return sum(weight * parts[name] for name, weight in self.weights.items())


def _number(name: str, value: object) -> float:
    # ``bool`` is a subclass of ``int``.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"'rewards' have {name!r} = {value!r:.80}, expected a number")
    try:
        return check_reward(value)
    except ValueError as error:
        raise ValueError(f"'rewards' have {name!r} = {value!r:.80}: {error}") from error

"""Evidence against servers that adds up over the steps of a run, with a known probability of a false alarm.

Each statistic has an expectation of 0 (or less) at every token if the server is honest. So for every rate ``a`` the
product of ``exp(a * statistic - cost(a))`` over the tokens is a supermartingale: it does not grow on average. Its
logarithm is the *evidence*. Evidence below 0 is set to 0, which lets a test find a server that begins to lie late. Such
a restarted product exceeds c within n steps with a probability of at most n / c (Shiryaev and Roberts; Ville's
inequality). The limit follows from that, for ``RUN_STEPS`` steps, all servers, statistics and rates together.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

RUN_STEPS = 10_000
FALSE_ALARM = 0.01
"""Probability that one set of tests stops an honest run of ``RUN_STEPS`` steps."""
_SUSPICION = 0.25
"""Share of the limit from which on a server is under suspicion: the limits of all servers leave its numbers out."""


@dataclass
class ServerEvidence:
    """Evidence against each server of a run."""

    num_servers: int = 1
    evidence: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """Logarithm of each product by server and statistic, one for each rate."""
    num_products: ClassVar[int]
    """Number of products of one server: statistics times rates."""

    @property
    def limit(self) -> float:
        """Evidence, in nats, from which on a server counts as dishonest."""
        return math.log(RUN_STEPS * max(self.num_servers, 1) * self.num_products / FALSE_ALARM)

    def is_suspect(self, server: str) -> bool:
        """Return True if a part of the evidence that the limit needs is there."""
        values = [value for each in self.evidence.get(server, {}).values() for value in each]
        return max(values, default=0.0) > _SUSPICION * self.limit

    def state(self) -> dict[str, dict[str, list[float]]]:
        """Return the evidence for a checkpoint."""
        return self.evidence

    def restore(self, state: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
        """Restore what ``state`` returned."""
        self.evidence = {server: {k: list(v) for k, v in names.items()} for server, names in state.items()}

    def _exceeds(self, server: str, name: str, increments: Sequence[float], choices: int = 1) -> bool:
        """Add to a statistic's products, one for each rate and choice, and return True if one exceeds the limit."""
        values = self._values(server, name) or [0.0] * len(increments)
        total = [max(value + increment, 0.0) for value, increment in zip(values, increments, strict=True)]
        self.evidence.setdefault(server, {})[name] = total
        return max(total) > self.limit + math.log(choices)

    def _values(self, server: str, name: str) -> list[float]:
        return self.evidence.get(server, {}).get(name, [])


def normal_evidence(rates: Sequence[float], excess: float, squares: float) -> list[float]:
    """Return the evidence of a sum ``excess`` of centered variables with the sum of squares ``squares``.

    The squares stand for the variance, an approximation that simulations test. For a sum that is skewed to the side of
    the excess it is too careful: one large value adds more to the cost than to the excess.
    """
    return [rate * excess - rate**2 / 2 * squares for rate in rates]

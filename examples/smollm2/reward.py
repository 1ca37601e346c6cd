import re


def score(completion: str, label: str, **_: object) -> float:
    """Return 1 where the last number of the answer is the label."""
    numbers = re.findall(r"-?\d+", completion)
    return float(numbers[-1:] == [label])

"""Names of data sources: what messages, metrics and ``[data.sources]`` call a file, a task or a data set of the hub."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

HUB = "hf:"
TASK = "task:"


def name_sources(sources: Iterable[str]) -> dict[str, str]:
    """Return the name of each source. Two paths never share a name.

    A file is called by its name without its folder. If several files have that name, each gets as many of its folders
    as tell it from the others. Any other source is its own name.

    Example:
        >>> name_sources(["/d/gsm8k/train.jsonl", "/d/math/train.jsonl", "/d/aime.parquet", "hf:a/b"])
        ... # doctest: +NORMALIZE_WHITESPACE
        {'/d/gsm8k/train.jsonl': 'gsm8k/train.jsonl', '/d/math/train.jsonl': 'math/train.jsonl',
         '/d/aime.parquet': 'aime.parquet', 'hf:a/b': 'hf:a/b'}
    """
    listed = list(sources)
    paths = {source: Path(source).parts for source in listed if not source.startswith((HUB, TASK))}
    # "./a.jsonl" and "a.jsonl" are one path with one name.
    endings = Counter(parts[start:] for parts in {*paths.values()} for start in range(len(parts)))
    return {source: _shortest(paths[source], endings) if source in paths else source for source in listed}


def _shortest(parts: tuple[str, ...], endings: Counter[tuple[str, ...]]) -> str:
    """Return the shortest ending of a path that no other path has; the whole path if each has another."""
    candidates = (parts[start:] for start in reversed(range(len(parts))))
    return str(Path(*next((each for each in candidates if endings[each] == 1), parts)))

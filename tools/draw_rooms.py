"""Draw which rooms of the package import which: ``python tools/draw_rooms.py [--revision OTHER] OUT.png``.

A room is a folder of the package, or a module of its root. It stands above everything that it imports; arrows that
follow from others are left out. ``--revision`` draws the package of another commit above that of the working tree.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

ROOT = Path(__file__).parents[1]
PACKAGE = "megatron_dppo"


def sources(revision: str | None) -> Iterator[tuple[tuple[str, ...], str]]:
    """Path inside the package and text of every module, of the working tree or of a commit."""
    if revision is None:
        for file in sorted((ROOT / PACKAGE).rglob("*.py")):
            yield file.relative_to(ROOT / PACKAGE).parts, file.read_text()
        return
    command = ["git", "-C", str(ROOT), "ls-tree", "-r", "--name-only", revision, PACKAGE]
    for name in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split():
        if name.endswith(".py"):
            show = ["git", "-C", str(ROOT), "show", f"{revision}:{name}"]
            yield Path(name).parts[1:], subprocess.run(show, capture_output=True, text=True, check=True).stdout


def room_graph(revision: str | None) -> tuple[dict[str, set[str]], Counter[str]]:
    """What each room imports of the others, and its number of modules."""
    modules = {parts: text for parts, text in sources(revision) if not parts[-2:][0].endswith("_extension")}
    known = {parts[0].removesuffix(".py") for parts in modules} - {"__init__"}
    graph: dict[str, set[str]] = {room: set() for room in known}
    sizes: Counter[str] = Counter()
    for parts, text in modules.items():
        room = parts[0].removesuffix(".py")
        if room not in known:
            continue
        sizes[room] += parts[-1] != "__init__.py"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
                below = (node.module or "").split(".")[1:2] or [alias.name for alias in node.names]
                graph[room] |= (set(below) & known) - {room}
    return graph, sizes


def floors(graph: dict[str, set[str]]) -> list[list[str]]:
    """Rooms from the ground up.

    Raises:
        SystemExit: rooms import each other in a circle.
    """
    left, result = dict(graph), list[list[str]]()
    while left:
        free = sorted(room for room, used in left.items() if not used & left.keys())
        if not free:
            raise SystemExit(f"a circle among {sorted(left)}")
        result.append(free)
        left = {room: used for room, used in left.items() if room not in free}
    return result


def without_shortcuts(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The graph less the arrows that two or more others imply."""

    def reach(room: str) -> set[str]:
        return graph[room].union(*(reach(other) for other in graph[room])) if graph[room] else set()

    return {room: used - set().union(*(reach(other) for other in used)) for room, used in graph.items()}


def draw(axes: Axes, graph: dict[str, set[str]], sizes: Counter[str], title: str) -> None:
    """One picture of a graph."""
    levels = floors(graph)
    widest = max(len(level) for level in levels)
    place = {
        room: (widest * (i + 0.5) / len(level), height)
        for height, level in enumerate(levels)
        for i, room in enumerate(level)
    }
    for room, used in without_shortcuts(graph).items():
        for other in used:
            axes.annotate("", place[other], place[room], arrowprops={"arrowstyle": "-", "color": "#b0b8c4", "lw": 0.8})
    for room, (x, y) in place.items():
        text = f"{room}\n{sizes[room]}" if sizes[room] > 1 else room
        box = {
            "boxstyle": "round,pad=0.35",
            "fc": "#eef3fb" if sizes[room] > 1 else "white",
            "ec": "#4a6a9a",
            "lw": 0.8,
        }
        axes.text(x, y, text, ha="center", va="center", fontsize=7.5, bbox=box)
    axes.set_title(f"{title}: {len(graph)} rooms on {len(levels)} floors", fontsize=10, loc="left")
    axes.set_xlim(0, widest)
    axes.set_ylim(-0.6, len(levels) - 0.4)
    axes.axis("off")


def main() -> None:
    """Read, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--revision", help="a commit to compare with")
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    views = [(f"at {options.revision}", options.revision)] if options.revision else []
    views.append(("the package", None))
    graphs = [(title, *room_graph(revision)) for title, revision in views]
    heights = [len(floors(graph)) for _, graph, _ in graphs]
    figure, rows = pyplot.subplots(
        len(graphs), 1, figsize=(10, 0.75 * sum(heights)), squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    for axes, (title, graph, sizes) in zip(rows[:, 0], graphs, strict=True):
        draw(axes, graph, sizes, title)
    figure.tight_layout()
    figure.savefig(options.out, dpi=80)


if __name__ == "__main__":
    main()

"""Draw the packages of one part, and what they import: ``python tools/draw_packages.py docs/packages``.

Writes ``OUT_core.png`` and ``OUT_wings.png``. A package stands above everything that it imports.
Lines that follow from others are left out. The number is that of its modules.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import matplotlib

from measure_structure import floors, graphs, sources

matplotlib.use("Agg")
from matplotlib import pyplot

PARTS = {
    "core": ("types", "advantages", "losses", "head", "parallel", "mcore", "policy", "run"),
    "wings": ("rollout", "engines", "weights", "rewards", "data", "report"),
}
"""Part -> its packages with their sub-packages."""


def main() -> None:
    """Draw each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", help="start of the pictures' paths")
    out = parser.parse_args().out
    modules, packages = graphs(dict(sources(None)))
    sizes = Counter(_containing_package(name, packages) for name in modules if name and name not in packages)
    for part, tops in PARTS.items():
        names = {name for name in packages if name.split(".")[0] in tops}
        graph = {name: packages[name] & names for name in names}
        draw(graph, sizes, Path(f"{out}_{part}.png"))


def _containing_package(module: str, packages: Mapping[str, set[str]]) -> str:
    parent = module.rpartition(".")[0]
    return parent if parent in packages else module


def without_shortcuts(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return the graph less the arrows that two or more others imply."""

    def reach(name: str) -> set[str]:
        return graph[name].union(*(reach(other) for other in graph[name])) if graph[name] else set()

    return {name: used - set().union(*(reach(other) for other in used)) for name, used in graph.items()}


def draw(graph: Mapping[str, set[str]], sizes: Mapping[str, int], picture: Path) -> None:
    """Draw one graph."""
    floor_of = floors(graph)
    levels = [sorted(name for name in graph if floor_of[name] == floor) for floor in sorted(set(floor_of.values()))]
    widest = max(len(level) for level in levels)
    position = {
        name: (widest * (i + 0.5) / len(level), height)
        for height, level in enumerate(levels)
        for i, name in enumerate(level)
    }
    figure, axes = pyplot.subplots(figsize=(1.5 * widest + 1, 0.8 * len(levels) + 0.4), layout="constrained")
    for name, used in without_shortcuts(graph).items():
        for other in used:
            style = {"arrowstyle": "-", "color": "#b0b8c4", "lw": 0.8}
            axes.annotate("", position[other], position[name], arrowprops=style)
    for name, (x, y) in position.items():
        box = {"boxstyle": "round,pad=0.35", "fc": "#eef3fb", "ec": "#4a6a9a", "lw": 0.8}
        axes.text(x, y, f"{name}\n{sizes.get(name, 1)}", ha="center", va="center", fontsize=8, bbox=box)
    axes.set_xlim(0, widest)
    axes.set_ylim(-0.6, len(levels) - 0.4)
    axes.axis("off")
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    main()

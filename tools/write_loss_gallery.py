"""Write docs/losses/README.md: formula, picture, use, source of every loss, the wind tunnel's verdict on it, and the
table of three axes from the first lines of the files in megatron_dppo/losses.

python tools/write_loss_gallery.py docs/losses/README.md [ROWS]

ROWS (default ``docs/windtunnel/rows.jsonl.xz``) is the ``rows.jsonl`` of ``megatron-dppo experiment windtunnel``,
packed or not. Without it, and for a loss without runs in it, the verdict says that nothing was measured.
"""

from __future__ import annotations

import json
import lzma
import re
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from draw_losses import HEAD_MU, HEAD_PI, RECOMPUTED, entries

from megatron_dppo.commands.experiments.statistics import SCORES, Band, Cell, Row, bands
from megatron_dppo.commands.experiments.verdicts import judge
from megatron_dppo.config.loss_registry import loss_classes

ROWS = Path(__file__).parents[1] / "docs/windtunnel/rows.jsonl.xz"
DEFAULT = "dppo_binary_tv cap 5"
"""the loss that the others are compared with: it is the configuration's default"""
MISSING = "not measured yet"

AXES = ("Differentiated", "Weight", "Mask")
HEAD = f"""# Losses: what each does with a token

Written by `tools/write_loss_gallery.py` from `gallery.toml`; the pictures by `tools/draw_losses.py`, which takes them
from the gradient of the losses themselves. Details: [loss.md](../loss.md), keys:
[configuration.md](../configuration.md#loss). Each loss is one file of `megatron_dppo/losses`: formula, keys, inputs,
rule, source and a worked example. mu is the rollout's probability, pi the present one, pi' the one that the
trainer recomputes with the rollout's weights.

{{axes}}

Each picture has μ, the probability that the token was sampled with, across, and π, the one it has now, upwards, both in
log-odds; the diagonal is π = μ. Colour is the factor of A ∇ log π: white 1, red more, blue less, dark = dropped,
purple = the update leads the other way. Left for A > 0, where an update raises π, right for A < 0. Some losses need
more than (μ, π):

- Top-K (K = 2): the two other ids of the head have the parts {HEAD_MU} under μ and {HEAD_PI} under π of what
  the token leaves, a tenth is outside. So the head has swapped, and a divergence is there on the diagonal too.
- π', the probability that the trainer recomputes at the rollout's weights, is {RECOMPUTED} μ.
- Whole sequences: of one token.

**Verdict**: bands (mean [least, largest] over seeds) of the mean training reward over the last quarter of the steps, on
small models ([experiments](../experiments.md#how-to-read-it)): without a mismatch, and in how many conditions the band
lies above or below that of `{DEFAULT}` without touching it; "on every seed": the bands overlap, but the
difference on the same seed has one sign on all five. DPPO's runs whose name has no cap are with `ratio_cap = "off"`.
"""


def read_rows(path: Path) -> list[Row]:
    """The rows of a file; none if it is not there."""
    if not path.is_file():
        return []
    data = path.read_bytes()
    text = (lzma.decompress(data) if path.suffix == ".xz" else data).decode("utf-8")
    return [json.loads(line) for line in text.splitlines()]


def verdict(names: Sequence[str], found: Mapping[Cell, Band]) -> list[str]:
    """Lines on the losses of these names."""
    lines = [line for name in names for line in _of_loss(name, found)]
    return lines or [f"Verdict: {MISSING}." if names else "Verdict: not in the wind tunnel."]


def _of_loss(name: str, found: Mapping[Cell, Band]) -> list[str]:
    lines = []
    for task in dict.fromkeys(task for task, _, loss in found if loss == name):
        mine = {mismatch: band for (at, mismatch, loss), band in found.items() if (at, loss) == (task, name)}
        told = [f"{mine['none']} without mismatch"] if "none" in mine else []
        if name != DEFAULT:
            told.append(_against(task, mine, found))
        else:
            told.append(", ".join(f"{band} {mismatch}" for mismatch, band in mine.items() if mismatch != "none"))
        lines.append(f"- `{name}`, {task}: {'; '.join(told)}")
    return lines


def _against(task: str, mine: Mapping[str, Band], found: Mapping[Cell, Band]) -> str:
    places: dict[str, list[str]] = {"holds": [], "reversed": []}
    for mismatch, band in mine.items():
        if (other := found.get((task, mismatch, DEFAULT))) is not None:
            places.setdefault(judge(band, other), []).append(mismatch)
    words = {"holds": "above", "reversed": "below", "open": "overlaps"}
    told = []
    for name, of in places.items():
        where = f" ({', '.join(of)})" if of and name not in ("open", "too few seeds") else ""
        told.append(f"{words.get(name, name)} in {len(of)}{where}")
    return f"against `{DEFAULT}`: {', '.join(told)}"


def section(entry: Mapping[str, Any], found: Mapping[Cell, Band]) -> str:
    """One loss."""
    keys = ", ".join(f"{key} = {json.dumps(value)}" for key, value in entry["config"].items())
    parts = [
        f"## {entry['title']}",
        f"`{keys}`",
        entry["formula"] + ".",
        f"![{entry['title']}]({entry['id']}.png)",
        f"When: {entry['when']}",
        f"Source: {entry['source']}.",
        "\n".join(verdict(entry["rows"], found)),
    ]
    return "\n\n".join(parts)


def axes() -> str:
    """Return the table of three axes, from the first lines of the files of the losses."""
    names: dict[str, list[str]] = {}
    for name, kind in loss_classes().items():
        names.setdefault(kind.__module__, []).append(f"`{name}`")
    lines = ["| `loss.name` | what is differentiated | weight | what the mask measures |", "|---|---|---|---|"]
    for module, of_module in names.items():
        said = import_module(module).__doc__ or ""
        cells = [re.findall(rf"^{axis}: (.*)$", said, re.MULTILINE)[0].replace("|", "\\|") for axis in AXES]
        file = module.rpartition(".")[2]
        link = f"[{file}.py](../../megatron_dppo/losses/{file}.py)"
        lines.append(f"| {', '.join(of_module)}: {link} | {' | '.join(cells)} |")
    return "\n".join(lines)


def document(rows: Sequence[Row]) -> str:
    """The whole page."""
    found = bands(rows, SCORES["final"])
    return (
        "\n\n".join([HEAD.rstrip().replace("{axes}", axes()), *(section(entry, found) for entry in entries())]) + "\n"
    )


if __name__ == "__main__":
    page, *given = map(Path, sys.argv[1:])
    page.write_text(document(read_rows(*(given or [ROWS]))), encoding="utf-8")

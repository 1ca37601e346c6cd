"""Write docs/losses/README.md.

The page has the formula, picture, use, source and wind tunnel verdict of every loss. Its table of three axes comes from
the first lines of the files in megatron_dppo/losses.

python tools/write_loss_gallery.py docs/losses/README.md [ROWS]

ROWS (default ``docs/windtunnel/rows.jsonl.xz``) is the ``rows.jsonl`` of ``megatron-dppo experiment windtunnel``,
compressed or not. Without it, and for a loss without runs in it, the verdict is "not measured yet".
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
"""Loss that the other losses are compared with: the default of the configuration."""
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
log-odds; the diagonal is π = μ. Color is the factor of A ∇ log π: white 1, red more, blue less, dark = masked,
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
    """Return the rows of a file, or no rows if it does not exist."""
    if not path.is_file():
        return []
    data = path.read_bytes()
    text = (lzma.decompress(data) if path.suffix == ".xz" else data).decode("utf-8")
    return [json.loads(line) for line in text.splitlines()]


def verdict(names: Sequence[str], measured_bands: Mapping[Cell, Band]) -> list[str]:
    """Return the verdict lines of the named losses."""
    lines = [line for name in names for line in _loss_lines(name, measured_bands)]
    return lines or [f"Verdict: {MISSING}." if names else "Verdict: not in the wind tunnel."]


def _loss_lines(name: str, measured_bands: Mapping[Cell, Band]) -> list[str]:
    lines = []
    for task in dict.fromkeys(task for task, _, loss in measured_bands if loss == name):
        loss_bands = {
            mismatch: band
            for (band_task, mismatch, loss), band in measured_bands.items()
            if (band_task, loss) == (task, name)
        }
        phrases = [f"{loss_bands['none']} without mismatch"] if "none" in loss_bands else []
        if name != DEFAULT:
            phrases.append(_compare_with_default(task, loss_bands, measured_bands))
        else:
            phrases.append(
                ", ".join(f"{band} {mismatch}" for mismatch, band in loss_bands.items() if mismatch != "none")
            )
        lines.append(f"- `{name}`, {task}: {'; '.join(phrases)}")
    return lines


def _compare_with_default(task: str, loss_bands: Mapping[str, Band], measured_bands: Mapping[Cell, Band]) -> str:
    mismatches_by_verdict: dict[str, list[str]] = {"holds": [], "reversed": []}
    for mismatch, band in loss_bands.items():
        if (other := measured_bands.get((task, mismatch, DEFAULT))) is not None:
            mismatches_by_verdict.setdefault(judge(band, other), []).append(mismatch)
    words = {"holds": "above", "reversed": "below", "open": "overlaps"}
    phrases = []
    for name, mismatches in mismatches_by_verdict.items():
        listed = f" ({', '.join(mismatches)})" if mismatches and name not in ("open", "too few seeds") else ""
        phrases.append(f"{words.get(name, name)} in {len(mismatches)}{listed}")
    return f"against `{DEFAULT}`: {', '.join(phrases)}"


def section(entry: Mapping[str, Any], measured_bands: Mapping[Cell, Band]) -> str:
    """Return the section of one loss."""
    keys = ", ".join(f"{key} = {json.dumps(value)}" for key, value in entry["config"].items())
    parts = [
        f"## {entry['title']}",
        f"`{keys}`",
        entry["formula"] + ".",
        f"![{entry['title']}]({entry['id']}.png)",
        f"When: {entry['when']}",
        f"Source: {entry['source']}.",
        "\n".join(verdict(entry["rows"], measured_bands)),
    ]
    return "\n\n".join(parts)


def axes() -> str:
    """Return the table of three axes, from the first lines of the files of the losses."""
    names: dict[str, list[str]] = {}
    for name, kind in loss_classes().items():
        names.setdefault(kind.__module__, []).append(f"`{name}`")
    lines = ["| `loss.name` | what is differentiated | weight | what the mask measures |", "|---|---|---|---|"]
    for module, module_names in names.items():
        docstring = import_module(module).__doc__ or ""
        cells = [re.findall(rf"^{axis}: (.*)$", docstring, re.MULTILINE)[0].replace("|", "\\|") for axis in AXES]
        file = module.rpartition(".")[2]
        link = f"[{file}.py](../../megatron_dppo/losses/{file}.py)"
        lines.append(f"| {', '.join(module_names)}: {link} | {' | '.join(cells)} |")
    return "\n".join(lines)


def document(rows: Sequence[Row]) -> str:
    """Return the text of the page."""
    measured_bands = bands(rows, SCORES["final"])
    return (
        "\n\n".join([HEAD.rstrip().replace("{axes}", axes()), *(section(entry, measured_bands) for entry in entries())])
        + "\n"
    )


if __name__ == "__main__":
    page, *given = map(Path, sys.argv[1:])
    page.write_text(document(read_rows(*(given or [ROWS]))), encoding="utf-8")

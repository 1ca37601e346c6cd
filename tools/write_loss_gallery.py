"""Write docs/losses/README.md.

The page has the formula, picture, use, source and wind tunnel verdict of every loss. Its table of three axes comes from
the first lines of the files in megatron_dppo/losses.

python tools/write_loss_gallery.py docs/losses/README.md

The verdicts are of ``docs/results/windtunnel/rows.jsonl.xz`` and ``third_rows.jsonl.xz``, the ``rows.jsonl`` of
``megatron-dppo experiment windtunnel`` and ``windtunnel3``.
"""

from __future__ import annotations

import argparse
import json
import lzma
import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from draw_losses import HEAD_MU, HEAD_PI, RECOMPUTED, entries
from megatron_dppo.config.loss_registry import loss_classes
from megatron_dppo_lab.paired import UNDECIDED, judge_pair
from megatron_dppo_lab.statistics import SCORES, Band, Cell, Row, bands
from megatron_dppo_lab.verdicts import judge
from write_question_pages import Results

WINDTUNNEL = Path(__file__).parents[1] / "docs/results/windtunnel"
ROWS, THIRD_ROWS = WINDTUNNEL / "rows.jsonl.xz", WINDTUNNEL / "third_rows.jsonl.xz"
DEFAULT = "dppo_binary_tv cap 5"
"""Loss that the second edition compares the others with: the default of the configuration."""
THIRD_DEFAULT = "dppo_binary_tv tuned"
"""The same of the third edition."""

AXES = ("Differentiated", "Weight", "Mask")
HEAD = f"""# Losses: what each does with a token

`tools/write_loss_gallery.py` writes this page from `gallery.toml`. `tools/draw_losses.py` draws the pictures from the
gradients of the losses. Details: [loss.md](../loss.md), keys: [configuration.md](../configuration.md#loss).

Each loss is one file of `megatron_dppo/losses`, with formula, keys, inputs, rule, source and an example. mu is the
probability that the engine reported when it sampled the token. pi is the probability now. pi' is the probability that
the trainer recomputes with the rollout's weights. A *masked* token gets no gradient.

Every loss shows what it does with tokens of your own, such as two whose probability was 0.4 and 0.5 when they were
sampled. The gradient is that of log pi:

```python
from megatron_dppo import LossConfig, losses

losses.show(LossConfig(name="ipo"), pi=[0.5, 0.9], mu=[0.4, 0.5], advantages=[1.0, -1.0])
```

```text
kept      True False
gradient -1.25  0.00
```

{{axes}}

How to read a picture:

- μ is the horizontal axis and π the vertical one, both in log-odds. On the diagonal π = μ.
- Color is the factor of A ∇ log π: white 1, red more, blue less, dark = masked, purple = the update leads
  the other way.
- The left half is for A > 0, where an update raises π. The right half is for A < 0.

Some losses depend on more than (μ, π). Their pictures assume:

- Top-K (K = 2): the sampled token leaves a probability of 1 - μ or 1 - π. The two other ids of the set have the parts
  {HEAD_MU} of it under μ and {HEAD_PI} under π. A tenth is outside the set. So the diagonal has a divergence too.
- Recomputed log-probabilities: π' is {RECOMPUTED} μ.
- Sequences: they have one token.

**Verdict** compares results of the [wind tunnel](../results/windtunnel/README.md), on small models.

- *Third edition*: exact tests over twelve paired seeds of the mean reward over all steps, corrected for all declared
  comparisons. Each verdict names both losses with their searched settings, and the mean difference. The
  [table](../../benchmarks/windtunnel/third_table.md) has every condition.
- *[Second edition](../../benchmarks/windtunnel/second_edition.md)*: bands, mean [least, largest] over five seeds of
  the training reward in the last quarter of the steps. It has the band without mismatch, and the number of
  conditions whose band is above or below that of `{DEFAULT}` without touching it. "On every seed" means that the
  bands overlap, but the difference has one sign on all five seeds. A DPPO run
  whose name has no cap used `ratio_cap = "off"`.

Both editions searched a threshold for each loss, so these runs did not use the defaults.
"""


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file, compressed or not."""
    data = path.read_bytes()
    text = (lzma.decompress(data) if path.suffix == ".xz" else data).decode("utf-8")
    return [json.loads(line) for line in text.splitlines()]


def verdict(entry: Mapping[str, Any], measured_bands: Mapping[Cell, Band], third: Results) -> list[str]:
    """Return the verdict lines of a gallery entry."""
    newer = [line for name in entry.get("third", ()) for line in _third_lines(name, third)]
    older = [line for name in entry["rows"] for line in _loss_lines(name, measured_bands)]
    if not newer and not older:
        return ["Verdict: not in the [wind tunnel](../results/windtunnel/README.md)."]
    editions = (("Third edition:", newer), ("Second edition:", older))
    return [text for title, lines in editions if lines for text in (title, "", *lines, "")][:-1]


def _third_lines(name: str, third: Results) -> list[str]:
    """Return a line for each declared opponent of a loss, of the conditions whose seeds are all finished.

    Binary-TV is the opponent of most losses, and has its verdicts in their sections.
    """
    verdicts: dict[str, dict[str, list[tuple[str, float]]]] = {}
    for declared, corrected in third.comparisons:
        is_second = (declared.claim.better, declared.claim.worse) == (THIRD_DEFAULT, name)
        each = declared.reversed() if is_second else declared
        if not each.is_complete or each.claim.better != name:
            continue
        losses = zip((name, each.claim.worse), each.settings, strict=True)
        pair = " against ".join(f"`{loss}` ({settings})" for loss, settings in losses)
        mean = sum(each.differences) / len(each.differences)
        measured = f"{each.task} {each.mismatch}", mean
        verdicts.setdefault(pair, {}).setdefault(judge_pair(each, corrected), []).append(measured)
    return [
        f"- {pair}: " + "; ".join(f"{word} in {_conditions(word, by_word[word])}" for word in sorted(by_word))
        for pair, by_word in verdicts.items()
    ]


def _conditions(word: str, measured: Sequence[tuple[str, float]]) -> str:
    """Return conditions with their differences, or the number of many that are undecided."""
    if word == UNDECIDED and len(measured) > 3:
        means = [mean for _, mean in measured]
        return f"{len(measured)} conditions ({min(means):+.3f} to {max(means):+.3f})"
    return ", ".join(f"{condition} ({mean:+.3f})" for condition, mean in measured)


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


def section(entry: Mapping[str, Any], measured_bands: Mapping[Cell, Band], third: Results) -> str:
    """Return the section of one loss."""
    keys = ", ".join(f"{key} = {json.dumps(value)}" for key, value in entry["config"].items())
    parts = [
        f"## {entry['title']}",
        f"`{keys}`",
        entry["formula"] + ".",
        f"![{entry['title']}]({entry['id']}.png)",
        f"When: {entry['when']}",
        f"Source: {entry['source']}.",
        "\n".join(verdict(entry, measured_bands, third)),
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


def document(rows: Sequence[Row], third_rows: Sequence[Row]) -> str:
    """Return the text of the page."""
    measured_bands, third = bands(rows, SCORES["final"]), Results.of(third_rows)
    head = HEAD.rstrip().replace("{axes}", axes())
    return "\n\n".join([head, *(section(entry, measured_bands, third) for entry in entries())]) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.parse_args().page.write_text(document(read_rows(ROWS), read_rows(THIRD_ROWS)), encoding="utf-8")

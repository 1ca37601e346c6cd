"""The table, the JSON file and the plot of one run."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import torch

from head_bench.results import Check, Results, Row
from head_bench.timing import PAGES, Ratio

_MIB = 2**20


def table(results: Results) -> str:
    """Return a Markdown table with one line for each method. ``*`` marks those that do the whole task."""
    head = ["method", "gives", "gradient of", "products", "traffic B/logit (large)", "peak B/logit"]
    head += ["collectives", "B/token", "log p error", "dH", "dW"]
    full = any(row.full_peak is not None for row in results.rows)
    head += ["peak MiB"] * full
    timed = [pages for pages in PAGES if results.limits]
    shared = [pages for pages in PAGES if any(row.parallel_times for row in results.rows)]
    head += [f"time, {pages} pages" for pages in timed] + [f"TP = 2, {pages}" for pages in shared]
    lines = [head, ["---"] * len(head)]
    lines += [_cells(row, results, full, timed, shared) for row in results.rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines)


def sweep_table(sweep: dict[str, dict[str, Ratio]]) -> str:
    """Return a Markdown table of times relative to ours B: one line for each method, one column for each size."""
    lines = ["| method | " + " | ".join(sweep) + " |", "|---" * (1 + len(sweep)) + "|"]
    for name in next(iter(sweep.values())):
        lines.append(f"| {name} | " + " | ".join(str(ratios[name]) for ratios in sweep.values()) + " |")
    return "\n".join(lines)


def _cells(row: Row, results: Results, full: bool, timed: list[str], shared: list[str]) -> list[str]:
    counts, parallel = results.sizes["counts"], row.parallel
    logits = counts.tokens * counts.vocab
    errors = row.errors["bfloat16"]
    calls = payload = "no TP"
    if parallel is not None:
        given = parallel["collectives"]
        extra = len(parallel["backward_collectives"])
        calls = f"{len(given)}" + (f" + {extra}" if extra else "")
        payload = f"{sum(size for _, size in given) / results.sizes['parallel'].tokens:.0f}"
    cells = [row.method.name + " *" * row.method.equal_task, row.method.offers, row.method.gradients]
    cells += [f"{row.gemms:.2f}", f"{row.traffic:.0f} ({row.large_traffic:.0f})", f"{row.peak / logits:.2f}"]
    cells += [calls, payload, f"{errors.logprobs:.1e}", f"{errors.grad_hidden:.1e}", f"{errors.grad_weight:.1e}"]
    if full:
        cells.append("" if row.full_peak is None else f"{row.full_peak / _MIB:,.0f}")
    cells += [str(row.times.get(pages, "")) for pages in timed]
    cells += [str(row.parallel_times.get(pages, "")) for pages in shared]
    return cells


def environment(device: str) -> dict[str, Any]:
    """Return the versions and hardware of the measurement."""
    about: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version(), "device": device}
    about["threads"] = torch.get_num_threads()
    if device == "cuda":
        return about | {"gpu": torch.cuda.get_device_name()}
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return about | {"cpu": names[0] if names else platform.processor()}


def write_json(path: Path, results: Results, checks: dict[str, list[Check]], about: dict[str, Any]) -> None:
    """Write all results as JSON."""
    content = {
        "environment": about,
        "sizes": {name: str(size) for name, size in results.sizes.items()},
        "methods": [row.as_dict() for row in results.rows],
        "zero_share": results.zero_share,
        "zero_products": results.zero_gemms,
        "zero_times": {pages: ratio.as_dict() for pages, ratio in results.zero_times.items()},
        "three_products_times": {pages: ratio.as_dict() for pages, ratio in results.limits.items()},
        "checks": {
            kind: [vars(check) | {"holds": check.holds} for check in kind_checks]
            for kind, kind_checks in checks.items()
        },
    }
    path.write_text(json.dumps(content, indent=2) + "\n")


def write_sweep(path: Path, sweep: dict[str, dict[str, Ratio]], about: dict[str, Any]) -> None:
    """Write the times of ``sweep_table`` as JSON."""
    times = {size: {name: ratio.as_dict() for name, ratio in ratios.items()} for size, ratios in sweep.items()}
    path.write_text(json.dumps({"environment": about, "times": times}, indent=2) + "\n")


def plot(path: Path, results: Results) -> None:
    """Plot bars of peak memory and of measured times, methods for the whole task in a darker shade."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import NullFormatter

    rows = list(reversed(results.rows))
    timed = [row for row in rows if row.times]
    full = all(row.full_peak is not None for row in rows)
    peaks = [(row.full_peak if full else row.peak) or 0 for row in rows]
    figure, panels = pyplot.subplots(1, 1 + bool(timed), figsize=(5 * (1 + bool(timed)), 3.6), squeeze=False)
    left = panels[0][0]
    bars = left.barh([r.method.name for r in rows], [p / _MIB for p in peaks], color=[_shade(r) for r in rows])
    left.bar_label(bars, fmt="{:,.0f}", padding=3, fontsize=8)
    left.set_xscale("log")
    left.margins(x=0.2)
    left.xaxis.set_minor_formatter(NullFormatter())
    left.set_xlabel("peak, MiB")
    left.set_title(str(results.sizes["peak" if full else "counts"]), fontsize=9)
    if timed:
        _plot_times(panels[0][1], timed, str(results.sizes["time"]))
    figure.text(
        0.5, 0.01, "dark: the whole task (K ids and entropy); light: part of it; green: ours", ha="center", fontsize=8
    )
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _plot_times(panel: Any, rows: list[Row], title: str) -> None:
    for shift, pages in ((0.2, "fresh"), (-0.2, "kept")):
        times = [row.times[pages] for row in rows]
        reach = [[t.median - t.least for t in times], [t.most - t.median for t in times]]
        heights = [row + shift for row in range(len(rows))]
        colors, alpha = [_shade(row) for row in rows], 1.0 if pages == "kept" else 0.45
        bars = panel.barh(heights, [t.median for t in times], height=0.38, xerr=reach, color=colors, alpha=alpha)
        panel.bar_label(bars, [f"{t.median:.2f} {pages}" for t in times], padding=6, fontsize=7)
    panel.set_yticks(range(len(rows)), [row.method.name for row in rows])
    panel.margins(x=0.2)
    panel.set_xlabel("CPU time over ours B (median, range)")
    panel.set_title(title, fontsize=9)


def _shade(row: Row) -> str:
    if row.method.ours:
        return "#2a7f3f"
    return "#34495e" if row.method.equal_task else "#a9b7c6"

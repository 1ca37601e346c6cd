"""``megatron-dppo plan``: a run rehearsed without GPUs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_dppo.config.io import load_config
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import PlanError

if TYPE_CHECKING:
    from megatron_dppo.commands.plan.search import Search

_NEAREST = 3
"""Settings that are named when the given ones do not fit."""


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``plan``; all others are overrides of the configuration."""
    parser.add_argument("config", help="TOML configuration file")
    parser.add_argument("--world-size", type=int, required=True, help="number of trainer processes, one a GPU")
    parser.add_argument("--machine", default="h100", help="h100 (default) or h200")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="ranks that are rehearsed at a time")
    parser.add_argument(
        "--rank-kinds",
        nargs="+",
        metavar="KIND",
        help="all, or first middle last (pipeline stages), hot (busy experts); default: all that the layout has",
    )
    parser.add_argument(
        "--search",
        nargs="*",
        metavar="KEY=VALUE,VALUE",
        help="rehearse all combinations of these values and rank them; without keys: parallel sizes and recompute",
    )


def run_plan(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print the plan, or the ranking of a search; the exit code is 0 if it (or one of them) fits, else 1.

    Raises:
        UserError: the configuration cannot run so, or cannot be rehearsed.
    """
    from megatron_dppo.commands.plan.machine import machine_named
    from megatron_dppo.commands.plan.plan import make_plan
    from megatron_dppo.commands.plan.rehearsals import Rehearsals
    from megatron_dppo.commands.plan.search import Search
    from megatron_dppo.commands.plan.text import as_text

    for name, value in (("--world-size", options.world_size), ("--jobs", options.jobs)):
        if value < 1:
            raise PlanError(f"{name} {value}: expected at least 1")
    if options.search is not None and options.rank_kinds:
        raise PlanError("--rank-kinds with --search: a search rehearses the ranks that need most; leave one out")
    machine = machine_named(options.machine)

    def load(flags: Sequence[str]) -> Config:
        return load_config(options.config, [*overrides, *flags])

    with Rehearsals(options.jobs) as rehearsals:
        if options.search is not None:
            return _search(Search(load, options.world_size, machine, rehearsals), options.search)
        plan = make_plan(load(()), options.world_size, machine, rehearsals, kinds=options.rank_kinds)
        print(as_text(plan), flush=True)
        if not plan.too_large:
            return 0
        print(_nearest(Search(load, options.world_size, machine, rehearsals)))
        return 1


def _nearest(search: Search) -> str:
    from megatron_dppo.commands.plan.text import candidates_text

    try:
        nearest = list(search.nearest(_NEAREST))
    except PlanError:
        nearest = []
    return f"\nNearest settings that fit:\n{candidates_text(nearest)}" if nearest else "\nNo other settings fit."


def _search(search: Search, texts: Sequence[str]) -> int:
    from megatron_dppo.commands.plan.search import axes_of
    from megatron_dppo.commands.plan.text import candidates_text

    def told(total: int, done: int) -> None:
        print(f"\r{done} of {total} rehearsed", end="", file=sys.stderr, flush=True)

    found = search.all(axes_of(texts), told)
    print("\r", end="", file=sys.stderr)
    print(candidates_text(found))
    return 1 if any(found[0].order[:2]) else 0

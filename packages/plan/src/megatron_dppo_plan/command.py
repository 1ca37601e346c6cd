"""``megatron-dppo plan``: memory, collectives and time of a run, rehearsed without GPUs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from megatron_dppo.errors import PlanError

if TYPE_CHECKING:
    from megatron_dppo.config.schema import Config
    from megatron_dppo_plan.search import Candidate, PlanSearch

HELP = "estimate a run without GPUs: memory, collectives, time"
HAS_OVERRIDES = True

_NUM_NEAREST = 3
"""Number of alternatives that are printed when a run does not fit."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``plan``; unknown arguments are overrides of the configuration."""
    parser.add_argument("config", help="TOML configuration file")
    parser.add_argument("--world-size", type=int, required=True, help="number of trainer processes, one per GPU")
    parser.add_argument("--machine", default="h100", help="h100 (default), h200 or gb300")
    parser.add_argument(
        "--num-servers",
        type=int,
        help="inference servers of the whole run; default: as many as the configuration names",
    )
    parser.add_argument(
        "--mean-response-tokens", type=int, help="mean response length; default: 0.4 x rollout.max_new_tokens"
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="number of ranks to rehearse concurrently"
    )
    parser.add_argument(
        "--rank-kinds",
        nargs="+",
        metavar="KIND",
        help="ranks to rehearse: all, or first middle last (pipeline stages), and hot (busy experts); default: all "
        "kinds of the layout",
    )
    parser.add_argument(
        "--search",
        nargs="*",
        metavar="KEY=VALUE,VALUE",
        help="rehearse all combinations of these values and rank them (default: parallel sizes and recompute)",
    )
    parser.add_argument(
        "--search-seconds",
        type=float,
        default=150.0,
        help="time limit of a search, also of that for settings that fit; default: 150",
    )
    parser.add_argument(
        "--all-layers", action="store_true", help="rehearse every layer; default: a few of each kind, and extrapolate"
    )
    parser.add_argument("--verbose", action="store_true", help="also print the collectives of each rank")


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print the plan of a run, or the ranking of a search.

    Return 0 if the run, or one setting of the search, fits; else 1.
    """
    from megatron_dppo.config.io import load_config
    from megatron_dppo_plan.machine import get_machine
    from megatron_dppo_plan.plan import make_plan
    from megatron_dppo_plan.rehearsal_pool import RehearsalPool
    from megatron_dppo_plan.search import PlanSearch
    from megatron_dppo_plan.step_time import sbatch_line
    from megatron_dppo_plan.text import format_plan

    numbers = ("world_size", "jobs", "num_servers", "mean_response_tokens", "search_seconds")
    for name, value in ((f"--{name.replace('_', '-')}", getattr(options, name)) for name in numbers):
        if value is not None and value < 1:
            raise PlanError(f"{name} {value}: expected at least 1")
    if options.search is not None and options.rank_kinds:
        raise PlanError(
            "--rank-kinds cannot be used with --search, which rehearses the ranks that need most. Fix: remove one of "
            "them"
        )
    machine = get_machine(options.machine)

    def load(flags: Sequence[str]) -> Config:
        return without_functions(load_config(options.config, [*overrides, *flags]))

    config = load(())
    mean = options.mean_response_tokens
    if mean is not None and mean > config.rollout.max_new_tokens:
        raise PlanError(
            f"--mean-response-tokens {mean}: expected at most rollout.max_new_tokens = {config.rollout.max_new_tokens}"
        )
    with RehearsalPool(options.jobs) as rehearsals:

        def new_search() -> PlanSearch:
            return PlanSearch(load, options.world_size, machine, rehearsals, options.search_seconds, mean)

        if options.search is not None:
            return _search(new_search(), options.search)
        plan = make_plan(
            config,
            options.world_size,
            machine,
            rehearsals,
            kinds=options.rank_kinds,
            few_layers=not options.all_layers,
            servers=options.num_servers,
            mean_response=mean,
        )
        print(format_plan(plan, verbose=options.verbose), flush=True)
        print(f"submit   {sbatch_line(options.config, overrides, plan.step, machine)}", flush=True)
        if plan.fits:
            return 0
        print(_format_nearest(new_search()))
        return 1


def without_functions(config: Config) -> Config:
    """Return the configuration with a built-in loss for a user's, which is not executed: a rehearsal computes it."""
    if not config.loss.has_text:
        return config
    from megatron_dppo.config.loss import LossConfig

    loss = config.loss
    values: dict[str, Any] = {"kl_coef": loss.kl_coef, "entropy_coef": loss.entropy_coef}
    values |= {"name": "dppo_topk_tv", "topk": loss.topk} if loss.is_topk else {"name": "dppo_binary_tv"}
    built_in = LossConfig(**values)
    functions = " and ".join(dict.fromkeys(name for name in (loss.name, loss.mask) if name and ":" in name))
    print(f"note     not executed: {functions}. The plan is that of the loss {built_in.name}", flush=True)
    return config.model_copy(update={"loss": built_in})


def _format_nearest(search: PlanSearch) -> str:
    from megatron_dppo_plan.text import format_candidates

    nearest: list[Candidate] = []
    with suppress(PlanError):
        nearest += search.find_nearest(_NUM_NEAREST)
    note = "" if search.untried is None else f"\n{search.untried}"
    if nearest:
        return f"\nNearest settings that fit:\n{format_candidates(nearest)}{note}"
    return f"\nNo other settings fit.{note}" if search.untried is None else f"\nNo settings that fit were found.{note}"


def _search(search: PlanSearch, texts: Sequence[str]) -> int:
    from megatron_dppo_plan.search import parse_axes
    from megatron_dppo_plan.text import format_candidates

    def print_progress(total: int, done: int) -> None:
        print(f"\r{done} of {total} rehearsed", end="", file=sys.stderr, flush=True)

    candidates = search.rank_all(parse_axes(texts), print_progress)
    print("\r", end="", file=sys.stderr)
    print(format_candidates(candidates))
    if search.untried is not None:
        print(search.untried)
    # The best of them cannot run, or is too large.
    return 1 if any(candidates[0].sort_key[:2]) else 0

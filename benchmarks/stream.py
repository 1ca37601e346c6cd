"""Time that the trainer waits for rollouts, and lengths that it trains on, for each way to sample ahead.

    python benchmarks/stream.py [--train 200 100] [--reread 20000 60000 inf] [--steps 16] [--divide 8] [--only NAME]
                                [--servers 16] [--in-flight 4096] [--flat 0.3] [--oversample 1.5]

The scheduler, the engine and the pool of servers are those of a run (``RolloutScheduler``, ``ServerEngine``,
``ServerPool``), on the virtual clock of ``tests/faults/simulation``; trainer and servers are a model:

- 16 servers of 256 slots; a decode step takes 12 ms + 0.06 ms x running requests, and gives each of them a token.
- 256 prompts x 16 responses a step. Their lengths are log-normal and cut at 16,384; each is fixed by the prompt and the
  number among its siblings, so that a response goes on to the same length wherever it was stopped.
- An update of the weights takes all requests back, lasts 5 s, and sends them again. A server reads what they have so
  far at ``--reread`` tokens a second, and decodes nothing meanwhile; ``inf`` = caches are kept. Prompts cost nothing.
- Training takes as long as it is told. Rewards are coins. With ``--flat`` that share of the prompts has equal ones, and
  dynamic sampling is on.

``--divide n`` simulates 1/n of the servers, prompts and requests in flight; one token of the simulation stands for 64.
All ways are compared at the first rate of ``--reread``, the ways that keep the order at the others, too.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from transformers import Qwen3Config

from benchmarks.stream_servers import END, LONGEST, SIBLINGS, SLOTS, UNIT, Population, Server
from megatron_dppo.config.schema import Config
from megatron_dppo.engines.server_engine import ServerEngine
from megatron_dppo.report.clock import Clock
from megatron_dppo.rollout.scheduler import RolloutScheduler
from megatron_dppo.setup.engines import rollout_sampling_params
from tests.faults.simulation import seams
from tests.faults.simulation.clock import VirtualLoop
from tests.faults.simulation.trainer import SimTrainer, Tokenizer
from tests.unit.configs import config as build_config

WARM_UP, PROMPTS = 4, 256
PUBLISH_SECONDS = 5.0
LOG_MEAN, LOG_DEVIATION = 8.438, 0.9
_HF_CONFIG = Qwen3Config(vocab_size=64, eos_token_id=END)


@dataclass(frozen=True)
class Case:
    """One way to sample."""

    name: str
    staleness: int
    rollout: dict[str, Any] = field(default_factory=dict)
    barrier: bool = False
    """True if weights are updated only while nothing is sampled."""


_STOPPED = {"abort_slowest": True, "oversample": 1.25, "partial_rollouts": 2}
CASES = (
    Case("staleness 0", 0),
    Case("staleness 1, barrier", 1, barrier=True),
    *(Case(f"staleness {n}", n) for n in (1, 2, 3, 4)),
    *(Case(f"staleness {n}, completed", n, {"order": "completed"}) for n in (2, 3, 4)),
    *(Case(f"staleness {n}, slowest stopped", n, _STOPPED) for n in (0, 1)),
)


class BarrierStream(RolloutScheduler):
    """Waits for all that is sampled before the weights change."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._survives_updates = self._one_by_one = self._requests.one_by_one = False


@dataclass
class Step:
    """Measurements of one step."""

    seconds: float
    slot_seconds: float
    """Seconds summed over all slots in use."""
    reading_seconds: float
    """Seconds summed over all servers that recompute prefixes."""
    ages: dict[int, int]
    lengths: list[float]
    """Mean length of each trained group."""
    num_canceled: int
    cursor: int


class Run:
    """One run of a case.

    Args:
        case: how it samples.
        train: seconds of training.
        reread: tokens that a server reads in a second.
        options: of the command line.
    """

    def __init__(self, case: Case, train: float, reread: float, options: argparse.Namespace) -> None:
        self._train = train
        self._steps = options.steps
        part = options.divide
        self._loop = VirtualLoop(1e9, 10**9)
        self._loop.set_task_factory(seams.make_task)
        seams.NOW.loop, seams.NOW.names = self._loop, itertools.count(1)
        seams.NOW.foreign = {}
        seams.NOW.taken = []
        seams.NOW.started = []
        self.population = Population(LOG_MEAN, LOG_DEVIATION, options.flat)
        self.servers = [Server(i, self.population, reread) for i in range(options.servers // part)]
        in_flight = (options.in_flight or options.servers * SLOTS) // part
        servers: Any = self.servers
        engine = ServerEngine(servers, Tokenizer(), _HF_CONFIG, max_in_flight=in_flight, health_seconds=1e6)
        config = _config(case, options, [server.url for server in servers])
        kind = BarrierStream if case.barrier else RolloutScheduler
        scorer: Any = self.population
        self._engine = engine
        prompts: Any = self.population
        self.stream = kind(
            rollout=config.rollout,
            params=rollout_sampling_params(config),
            prompts=prompts,
            groups=SimTrainer.groups,
            dp_rank=0,
            dp=1,
            engine=engine,
            scorer=scorer,
            num_steps=config.run.num_steps,
            max_staleness=config.train.max_staleness,
        )

    def steps(self) -> Iterator[Step]:
        """Yield all steps, including the warm-up."""
        self._publish(0)
        for step in range(WARM_UP + self._steps):
            begin = self._loop.time()
            slots = self._sum("slot_seconds")
            reading = self._sum("reading_seconds")
            collected = self.stream.collect(step, step, Clock())
            self._loop.run(asyncio.sleep(self._train))
            self.stream.wait_before_update(Clock())
            self._publish(step + 1)
            seams.NOW.started = [task for task in seams.NOW.started if not task.done()]
            yield Step(
                seconds=self._loop.time() - begin,
                slot_seconds=self._sum("slot_seconds") - slots,
                reading_seconds=self._sum("reading_seconds") - reading,
                ages=collected.token_ages,
                lengths=[
                    UNIT * statistics.fmean(len(r.completion.token_ids) for r in g.rollouts) for g in collected.groups
                ],
                num_canceled=collected.dropped_groups["canceled"],
                cursor=self.stream.cursor,
            )
        self._loop.cancel_all()
        self._loop.close()

    def _sum(self, name: str) -> float:
        return sum(getattr(server, name) for server in self.servers)

    def _publish(self, version: int) -> None:
        self._engine.pause()
        self._loop.run(asyncio.sleep(PUBLISH_SECONDS))
        for server in self.servers:
            server.version = version
        self._engine.use_version(version, [server.url for server in self.servers])


def _config(case: Case, options: argparse.Namespace, urls: list[str]) -> Config:
    return build_config(
        run={"num_steps": 10**6},
        rollout={
            "engine": "sglang",
            "prompts_per_step": PROMPTS // options.divide,
            "samples_per_prompt": SIBLINGS,
            "max_new_tokens": LONGEST // UNIT,
            "dynamic_sampling": options.flat > 0,
            "oversample": options.oversample,
            "servers": {"urls": urls},
            **case.rollout,
        },
        train={"max_staleness": case.staleness},
        loss={"name": "dppo_binary_tv"},
    )


def row(case: Case, train: float, reread: float, options: argparse.Namespace) -> str:
    """Return one line of the table."""
    run = Run(case, train, reread, options)
    steps = list(run.steps())
    steady, servers = steps[WARM_UP:], len(run.servers)
    seconds = sum(step.seconds for step in steady)
    ages = sum((Counter(step.ages) for step in steady), Counter[int]())
    ahead = sum(len(submission.slots) for submission in run.stream._submissions)

    def bias(start: int, end: int) -> float:
        """Return the mean length of trained responses over that of the prompts scheduled for these steps."""
        drawn = range(0 if start == 0 else steps[start - 1].cursor - ahead, steps[end - 1].cursor - ahead)
        trained = [length for step in steps[start:end] for length in step.lengths]
        return statistics.fmean(trained) / run.population.mean_length(drawn)

    return (
        f"{case.name:<30}{seconds / len(steady):8.0f}{1 - train * len(steady) / seconds:7.1%}"
        f"{sum(s.slot_seconds for s in steady) / seconds / servers / SLOTS:8.0%}"
        f"{sum(s.reading_seconds for s in steady) / seconds / servers:9.0%}"
        f"{sum(age * tokens for age, tokens in ages.items()) / ages.total():8.2f}{max(ages):5}"
        f"{bias(0, 1):9.2f}{bias(0, WARM_UP):6.2f}{bias(WARM_UP, len(steps)):7.2f}"
        f"{sum(s.num_canceled for s in steady) / len(steady) * options.divide:10.1f}"
    )


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=float, nargs="+", default=[200.0, 100.0])
    parser.add_argument("--reread", type=float, nargs="+", default=[20e3, 60e3, float("inf")])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--divide", type=int, default=8, help="a divisor of the servers and of 256")
    parser.add_argument("--servers", type=int, default=16)
    parser.add_argument("--in-flight", type=int, help="as many as there are slots, if not given")
    parser.add_argument("--flat", type=float, default=0.0)
    parser.add_argument("--oversample", type=float, default=1.0)
    parser.add_argument("--only", nargs="+", help="names of rows")
    options = parser.parse_args()
    lengths = sorted(length for i in range(2000) for length in Population(LOG_MEAN, LOG_DEVIATION, 0.0).lengths(i))
    at = [UNIT * lengths[int(len(lengths) * share)] for share in (0.5, 0.99)]
    print(f"tokens of a response: mean {UNIT * statistics.fmean(lengths):.0f}, median {at[0]}, 99th percentile {at[1]}")
    alone, among = (LONGEST * (0.012 + 0.00006 * running) for running in (1, SLOTS))
    print(f"the longest response takes {alone:.0f} s alone on a server, {among:.0f} s among {SLOTS}; mean over the")
    print(f"{options.steps} steps after the first {WARM_UP}:")
    start = time.process_time()
    with seams.installed():
        for reread, train in itertools.product(options.reread, options.train):
            print(f"\ntraining {train:g} s, prefixes read at {reread:g} tokens/s" + " " * 24 + "trained length / drawn")
            print(f"{'':30}  s/step   idle   slots  reading     age  max   step 0   0-3  after  given up", flush=True)
            for case in CASES:
                plain = not (case.rollout or case.barrier) and case.staleness > 0
                if case.name in (options.only or [case.name]) and (plain or reread == options.reread[0]):
                    print(row(case, train, reread, options), flush=True)
    print(f"\n{time.process_time() - start:.0f} CPU seconds")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Faults and their seeded schedules."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

CALLS = (
    "/generate",
    "/health",
    "/model_info",
    "/server_info",
    "/pause_generation",
    "/begin_weight_update",
    "/update_weights_from_tensor",
    "/update_weights_from_distributed",
    "/update_weights_from_disk",
    "/end_weight_update",
    "/update_weight_version",
    "/flush_cache",
    "/weights_checker",
    "/continue_generation",
    "/abort_request",
    "/tokenize",
)
MEMORY_CALLS = ("/release_memory_occupation", "/resume_memory_occupation")
"""of servers on the trainer's GPUs"""

PROCESS = ("crash", "freeze", "slow", "partition")
"""of a whole server"""
WIRE = ("lose_request", "lose_answer", "reset_before", "reset_after", "twice", "late", "status", "junk")
"""of one call or a few"""
WEIGHTS = ("skip_update", "stuck_label", "spoil_tensor", "corrupt", "label")
"""what is confirmed and not so"""
SPOILS = ("bit", "lost", "swap", "round")
"""what ``spoil_tensor`` does to a tensor; the last two only by a choice of ``ALL_SPOILS`` and more"""
ALL_SPOILS = 1 << 16
LIES = (
    "shift_logprobs",
    "nan_logprobs",
    "positive_logprobs",
    "null_logprob",
    "round_logprobs",
    "scale_logprobs",
    "swap_content",
    "swap_answer",
    "repeat_answer",
    "truncate",
    "shift_routes",
    "wrong_routes",
    "scale_topk",
    "shift_topk",
    "swap_topk_ids",
    "huge_token",
    "negative_token",
    "string_token",
    "wrong_span",
    "wrong_reason",
    "too_long",
)
"""of answers to /generate"""
OUTSIDE = ("abort_all", "kill_trainer")
KINDS = (*PROCESS, *WIRE, *WEIGHTS, *(f"lie:{name}" for name in LIES), *OUTSIDE)
STATUSES = (400, 408, 425, 429, 500, 502, 503, 504)
RETRY_AFTER = ("", "", "2", "86400")
"""Seconds that a server asks for beside a status"""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong."""

    kind: str
    server: int
    at: float
    """virtual seconds"""
    span: float
    """how long it lasts"""
    choice: int
    """which variant"""
    on: str = ""
    """Not at a time: when the server gets this call for the ``nth`` time."""
    nth: int = 0

    def __str__(self) -> str:
        when = f"at {self.at:.2f} s" if not self.on else f"on call {self.nth} of {self.on}"
        return f"{self.kind} of server {self.server} {when} for {self.span:.2f} s, variant {self.choice}"


@dataclass(frozen=True)
class Plan:
    """One schedule: the run, and what goes wrong in it. All of it follows from the seed."""

    seed: int
    servers: int = 2
    steps: int = 3
    prompts: int = 2
    siblings: int = 2
    new_tokens: int = 6
    topk: int = 0
    routing: bool = False
    method: str = "ipc"
    engine_version: str = "0.5.23"
    stopping: bool = False
    """stop the slowest, carry on"""
    partial: int = 0
    oversample: float = 1.0
    dynamic: bool = False
    staleness: int = 0
    colocated: bool = False
    """servers and trainer take turns on the same GPUs"""
    order: str = "stream"
    max_in_flight: int = 64
    health_seconds: float = 5.0
    attempts: int = 3
    probe_every: int = 1
    checksum_every: int = 1
    token_seconds: float = 0.1
    latency: float = 0.01
    train_seconds: float = 2.0
    save_every: int = 1
    faults: tuple[Fault, ...] = field(default=())

    def __str__(self) -> str:
        mode = ("stopping, " if self.stopping else "") + f"staleness {self.staleness}"
        mode += ", colocated" if self.colocated else ""
        return (
            f"seed {self.seed}: {self.servers} servers ({self.engine_version}, {self.method}), {self.steps} steps of "
            f"{self.prompts} x {self.siblings}, {mode}, topk {self.topk}, routing {self.routing}, "
            f"{len(self.faults)} faults"
        )


ABORTED_LIES = Plan(
    seed=5,
    servers=1,
    steps=1,
    prompts=3,
    new_tokens=10,
    token_seconds=1.0,
    latency=0.3,
    health_seconds=10.0,
    faults=(
        Fault("lie:nan_logprobs", 0, at=21.75115, span=2.0, choice=0),
        Fault("abort_all", 0, at=22.05115, span=0.1, choice=0),
    ),
)
"""Three answers come at one moment: two break the contract, so that the server is given up, and one is right."""

TWO_LIVES = Plan(
    seed=1,
    servers=2,
    steps=3,
    prompts=3,
    new_tokens=10,
    token_seconds=1.0,
    train_seconds=20.0,
    save_every=3,
    health_seconds=2.0,
    latency=0.05,
    max_in_flight=2,
    faults=(Fault("kill_trainer", 0, 108.6, 1, 0), Fault("partition", 1, 108.5, 96.6, 0)),
)
"""A server is out of reach from the end of one life of the trainer until the next has a version of the same number."""

SILENT_RANKS = Plan(seed=2, servers=1, steps=1, faults=(Fault("silent_ranks", 0, at=0.0, span=1e6, choice=0),))
"""A server answers the question for its checksums without a rank."""

SPOILED_RETRY = Plan(
    seed=3,
    servers=1,
    steps=2,
    method="disk",
    probe_every=9,
    checksum_every=9,
    faults=(
        Fault("reset_after", 0, at=1.0, span=60.0, choice=0, on="/update_weights_from_disk"),
        Fault("spoil_tensor", 0, at=0.0, span=1.0, choice=ALL_SPOILS, on="/update_weights_from_disk", nth=3),
    ),
)
"""A sync that a sample would prove breaks off; in its second attempt a tensor is wrong that a sample lacks."""

ONE_OF_TWO = Plan(
    seed=4,
    servers=2,
    steps=2,
    method="disk",
    probe_every=9,
    checksum_every=9,
    faults=(Fault("spoil_tensor", 0, at=0.0, span=1.0, choice=ALL_SPOILS, on="/update_weights_from_disk", nth=2),),
)
"""One of two servers has a wrong tensor, which only the comparison with the other server shows."""

LONG_REST = Plan(
    seed=6,
    servers=2,
    steps=1,
    prompts=3,
    new_tokens=10,
    token_seconds=1.0,
    latency=0.05,
    max_in_flight=2,
    faults=(Fault("status", 0, at=3.0, span=60.0, choice=27, on="/generate"),),
)
"""A server with too many requests asks for a day of rest."""

BY_HAND = (ABORTED_LIES, TWO_LIVES, SILENT_RANKS, SPOILED_RETRY, ONE_OF_TWO, LONG_REST)
"""Schedules that few seeds give: seed -1, -2, ..."""


def draw(seed: int) -> Plan:
    """The schedule of a seed."""
    if seed < 0:
        return BY_HAND[-1 - seed]
    rng = random.Random(seed)
    stopping = rng.random() < 0.4
    servers, steps = rng.choice((1, 2, 2, 2, 3)), rng.choice((1, 2, 2, 3))
    plan = Plan(
        seed=seed,
        servers=servers,
        steps=steps,
        prompts=rng.choice((1, 2, 3)),
        siblings=2,
        new_tokens=rng.choice((3, 6, 10)),
        topk=rng.choice((0, 3)),
        routing=rng.random() < 0.5,
        method=rng.choice(("ipc", "ipc", "distributed", "disk")),
        engine_version=rng.choice(("0.5.23", "0.5.23", "0.5.20")),
        stopping=stopping,
        partial=rng.choice((0, 1, 2)) if stopping else 0,
        oversample=rng.choice((1.5, 2.0)) if stopping else rng.choice((1.0, 1.0, 1.5)),
        dynamic=rng.random() < 0.25,
        staleness=rng.choice((0, 0, 0, 1, 1, 2)),
        max_in_flight=rng.choice((2, 64)),
        health_seconds=rng.choice((2.0, 10.0)),
        attempts=rng.choice((1, 2, 3)),
        probe_every=rng.choice((1, 1, 1, 2)),
        token_seconds=rng.choice((0.02, 0.3, 1.0)),
        latency=rng.choice((0.002, 0.05, 0.3)),
        train_seconds=rng.choice((0.5, 20.0)),
        save_every=rng.choice((1, 1, 2)),
    )
    if plan.staleness == 2 and not stopping:
        plan = replace(plan, order=rng.choice(("stream", "completed")))
    # About as long as a run takes when nothing happens.
    way, answer = 20 * 2 * plan.latency, plan.new_tokens * plan.token_seconds
    seconds = (steps + 1) * (way + answer) + steps * (answer + plan.train_seconds)
    count = rng.choice((0, 1, 1, 2, 2, 3, 3, 4, 5))
    plan = replace(plan, faults=tuple(_fault(rng, servers, seconds) for _ in range(count)))
    apart = plan.staleness > 0 or plan.method == "distributed" or seed % 2
    return plan if apart else _colocated(plan, random.Random(seed))


def _colocated(plan: Plan, rng: random.Random) -> Plan:
    """The same on shared GPUs; some faults wait for the calls that only these make."""
    faults = (
        replace(fault, on=rng.choice(MEMORY_CALLS), nth=rng.choice((1, 2, 3))) if rng.random() < 0.3 else fault
        for fault in plan.faults
    )
    return replace(plan, colocated=True, faults=tuple(faults))


def _fault(rng: random.Random, servers: int, seconds: float) -> Fault:
    family = rng.choice((PROCESS, PROCESS, WIRE, WEIGHTS, LIES, LIES, OUTSIDE))
    name = rng.choice(family)
    on, nth = ("", 0) if rng.random() < 0.5 else (rng.choice(CALLS), rng.choice((1, 1, 2, 2, 3, 4)))
    return Fault(
        kind=f"lie:{name}" if family is LIES else name,
        server=rng.randrange(servers),
        at=round(rng.uniform(0, seconds), 3),
        span=round(rng.choice((0.5, 5.0, 30.0, 300.0)) * rng.uniform(0.5, 1.5), 3),
        choice=rng.getrandbits(16),
        on=on,
        nth=nth,
    )

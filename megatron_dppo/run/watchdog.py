"""Says which rank the others wait for, before a collective gives up with less to say.

Each rank has two threads. One tells the store of the process group what its main thread does, and reads what the
others do. The other looks at that: when no rank has begun anything new for the limit and some are behind, they are
named. A rank is behind when it tells nothing any more (stopped, swapped out, its machine gone), has done fewer steps,
works alone while others wait, or is in another phase than the one that was entered last. Ranks that are all alive and
all in the same phase are never taken for hung: the phase may be long. No collective is used, and the clocks of other
machines only to order phases.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from megatron_dppo.config.run import RunConfig
from megatron_dppo.report.clock import PROGRESS

EXIT_CODE = 4
"""Exit code of a run that hangs."""
_SHARE_OF_TIMEOUT = 0.9
_ALONE = {"start", "rollout", "reward", "prefetch_wait", "publish", "evaluate", "save", "export"}
"""Phases in which a rank works alone for as long as it needs, while others wait over the CPU."""
_SHOWN = 4
_QUIET_SECONDS = 15.0
"""More than between two beats"""
_VERDICT = "megatron_dppo/hang"


@dataclass(frozen=True)
class Beat:
    """Last heartbeat of a rank."""

    count: int
    """Number of heartbeats sent."""
    changes: int
    step: int
    phase: str
    entered: float
    """Start of the phase, ``time.time()``."""
    pid: int
    host: str

    @classmethod
    def mine(cls, count: int) -> Beat:
        """Return the heartbeat of this process."""
        now = PROGRESS
        return cls(count, now.changes, now.step, now.phase, now.entered, os.getpid(), socket.gethostname())


@dataclass
class Seen:
    """A rank's last beat, and when this rank saw it change (``time.monotonic()``)."""

    beat: Beat
    told: float
    moved: float

    def update(self, beat: Beat, now: float) -> None:
        """Take in what was read."""
        if beat.count != self.beat.count:
            self.told = now
        if beat.changes != self.beat.changes:
            self.moved = now
        self.beat = beat


def find_behind(ranks: dict[int, Seen], now: float, limit: float, interval: float) -> list[int]:
    """The ranks that the others wait for; empty when one has moved within ``limit`` seconds, or none is behind.

    Args:
        ranks: all ranks.
        now: ``time.monotonic()``.
        limit: seconds without any movement.
        interval: seconds between two beats.
    """
    if now - max(seen.moved for seen in ranks.values()) < limit:
        return []
    silent = [rank for rank, seen in ranks.items() if now - seen.told > max(limit / 2, 4 * interval)]
    if silent:
        return silent
    furthest = max(seen.beat.step for seen in ranks.values())
    if slower := [rank for rank, seen in ranks.items() if seen.beat.step < furthest]:
        return slower
    # Not by the clock: a rank may begin its work when the others already wait for it.
    alone = [rank for rank, seen in ranks.items() if seen.beat.phase in _ALONE]
    if alone and any(seen.beat.phase == "waiting" for seen in ranks.values()):
        return alone
    last = max(ranks.values(), key=lambda seen: seen.beat.entered)
    return [rank for rank, seen in ranks.items() if seen.beat.phase != last.beat.phase]


def describe(ranks: dict[int, Seen], behind: list[int], now: float) -> str:
    """One sentence for each rank that is behind, and what the others do."""
    lines = []
    for rank in behind[:_SHOWN]:
        seen = ranks[rank]
        quiet = f", and has told nothing for {now - seen.told:.0f} s" if now - seen.told > _QUIET_SECONDS else ""
        lines.append(
            f"rank {rank} (process {seen.beat.pid} on {seen.beat.host}) has been in step {seen.beat.step}, phase "
            f"'{seen.beat.phase}', for {now - seen.moved:.0f} s{quiet}{_state(seen.beat)}"
        )
    if len(behind) > _SHOWN:
        lines.append(f"and {len(behind) - _SHOWN} more ranks: {behind[_SHOWN:]}")
    others = sorted({(s.beat.step, s.beat.phase) for rank, s in ranks.items() if rank not in behind})
    waiting = ", ".join(f"step {step}, phase '{phase}'" for step, phase in others)
    return "; ".join(lines) + f"; the others wait for it in {waiting}"


def _state(beat: Beat) -> str:
    """Return the kernel's state of a process on this machine, in words."""
    if beat.host != socket.gethostname():
        return ""
    try:
        state = Path(f"/proc/{beat.pid}/stat").read_text(encoding="latin-1").rpartition(")")[2].split()[0]
    except OSError:
        return ": it has ended"
    known = {
        "T": f": it is stopped (kill -CONT {beat.pid} lets it go on)",
        "D": ": it waits for a disk",
        "Z": ": it has ended",
    }
    return known.get(state, "")


class Watchdog:
    """Ends a run in which some ranks wait for others, with exit code 4; idle with one rank.

    Args:
        run: ``output_dir`` (the stack traces go to ``hang/rank_N.txt`` in it), ``hang_minutes``, ``timeout_minutes``,
            ``wait_minutes``.
    """

    def __init__(self, run: RunConfig) -> None:
        self._folder = Path(run.output_dir) / "hang"
        self._together = 60 * (run.hang_minutes or _SHARE_OF_TIMEOUT * run.timeout_minutes)
        self._alone = 60 * (run.hang_minutes or _SHARE_OF_TIMEOUT * run.wait_minutes)
        self._interval = min(10.0, self._together / 20)
        self._over = threading.Event()
        self._ranks: dict[int, Seen] = {}
        self._read_at = 0.0
        self._verdict = False

    def start(self) -> None:
        """Watch from now on; a collective of all ranks."""
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        if self._world == 1:
            return
        # A connection of its own: a thread that waits for an answer keeps the others of its client out.
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=60),
            wait_for_workers=False,
        )
        self._tell(0)
        dist.barrier()  # all have told something, so that nobody waits for a key
        self._read()
        for work in (self._talk, self._watch):
            threading.Thread(target=work, name="watchdog", daemon=True).start()

    def close(self) -> None:
        """Watch no more."""
        self._over.set()

    @property
    def _limit(self) -> float:
        """Seconds without any movement that are a hang, by what the ranks do now."""
        phases = {PROGRESS.phase, *(seen.beat.phase for seen in list(self._ranks.values()))}
        return self._alone if phases & _ALONE else self._together

    def _key(self, rank: int) -> str:
        return f"megatron_dppo/beat/{rank}"

    def _tell(self, count: int) -> None:
        self._store.set(self._key(self._rank), json.dumps(vars(Beat.mine(count))))

    def _read(self) -> None:
        values = self._store.multi_get([self._key(rank) for rank in range(self._world)])
        now = time.monotonic()
        for rank, value in enumerate(values):
            beat = Beat(**json.loads(value))
            self._ranks.setdefault(rank, Seen(beat, now, now)).update(beat, now)
        self._read_at = now

    def _talk(self) -> None:
        count = 0
        while not self._over.wait(self._interval):
            count += 1
            try:
                self._tell(count)
                self._read()
                self._verdict = self._store.check([_VERDICT])
            except (RuntimeError, dist.DistError):
                # Who keeps the store has ended: the launcher, or rank 0, whose end the collectives notice.
                return

    def _watch(self) -> None:
        mine, moved = PROGRESS.changes, time.monotonic()
        while not self._over.wait(self._interval):
            now = time.monotonic()
            if PROGRESS.changes != mine:
                mine, moved = PROGRESS.changes, now
            behind = find_behind(self._ranks, now, self._limit, self._interval)
            if self._verdict:
                self._end("")
            elif now - self._read_at > self._limit and now - moved > self._limit:
                self._end(self._deaf(now))
            elif behind and now - self._read_at < 4 * self._interval and self._speaks(behind):
                self._end(describe(self._ranks, behind, now))

    def _speaks(self, behind: list[int]) -> bool:
        """Return True if this rank reports."""
        return self._rank == min(set(range(self._world)) - set(behind), default=min(behind))

    def _deaf(self, now: float) -> str:
        """The store does not answer: its keeper, the launcher or rank 0, hangs."""
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        if self._rank != 1 and os.environ.get("LOCAL_RANK") != "0":
            return ""
        seen = self._ranks[0]
        state = _state(seen.beat)
        return (
            f"the store at {where}, kept by rank 0 (process {seen.beat.pid} on {seen.beat.host}) or the launcher, has "
            f"not answered for {now - self._read_at:.0f} s{state}; this rank waits in step {PROGRESS.step}, phase "
            f"'{PROGRESS.phase}'"
        )

    def _end(self, text: str) -> None:
        """Write the stack traces, report if this rank does, and leave: the main thread waits for what never comes."""
        with suppress(OSError):
            self._folder.mkdir(exist_ok=True)
            with (self._folder / f"rank_{self._rank:05d}.txt").open("w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        if text:
            print(
                f"\n[rank {self._rank}] error: the run hangs: no rank has begun anything new for {self._limit / 60:g} "
                f"minutes (run.hang_minutes). {text}. What each rank that answers was doing is in {self._folder}. The "
                "same command continues from the last checkpoint",
                file=sys.stderr,
                flush=True,
            )
            threading.Thread(target=self._tell_verdict, daemon=True).start()  # the store may not answer
        # The launcher ends all when the first one leaves: each has the time to read the verdict and to write. A main
        # thread whose collective fails meanwhile, as another rank has left, ends with this code too.
        atexit.register(os._exit, EXIT_CODE)
        time.sleep((8 if text else 4) * self._interval)
        os._exit(EXIT_CODE)

    def _tell_verdict(self) -> None:
        with suppress(RuntimeError):
            self._store.set(_VERDICT, "hangs")

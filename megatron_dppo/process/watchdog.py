"""Detection of a hung run: names the rank that the others wait for, before a collective times out.

Each rank has two threads. The first writes this rank's heartbeat (step and phase of its main thread) to a TCP store
and reads the heartbeats of the other ranks. The second evaluates them: if no rank has entered a new phase for the
limit and some ranks are behind, it reports those ranks and ends the process.

A rank is behind if one of these holds:
- It sends no heartbeat (stopped, swapped out, or its machine failed).
- It has done fewer steps.
- It works alone while others wait.
- It is in another phase than the rank that changed its phase last.

Ranks that are all alive and all in the same phase do not count as hung: the phase may be long. The watchdog uses no
collective. It uses the clocks of other machines only to order phases.
"""

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
from typing import Self

import torch.distributed as dist

from megatron_dppo.config.run import RunConfig
from megatron_dppo.report.clock import PROGRESS

EXIT_CODE = 4
_SHARE_OF_TIMEOUT = 0.9
_ALONE = {"start", "rollout", "reward", "prefetch_wait", "publish", "evaluate", "save", "export"}
"""Phases in which a rank works alone for as long as it needs, while others wait over the CPU."""
_MAX_RANKS_SHOWN = 4
_SILENT_SECONDS = 15.0
"""Seconds without a heartbeat that the report mentions. Longer than the interval between two heartbeats."""
_HANG_KEY = "megatron_dppo/hang"
"""Key of the store that a rank sets when it has found a hang."""


@dataclass(frozen=True)
class Heartbeat:
    """Last heartbeat of a rank."""

    count: int
    changes: int
    step: int
    phase: str
    entered: float
    """Start of the phase, ``time.time()``."""
    pid: int
    host: str

    @classmethod
    def current(cls, count: int) -> Self:
        """Return the heartbeat of this process."""
        return cls(
            count=count,
            changes=PROGRESS.changes,
            step=PROGRESS.step,
            phase=PROGRESS.phase,
            entered=PROGRESS.entered,
            pid=os.getpid(),
            host=socket.gethostname(),
        )


@dataclass
class RankStatus:
    """Last heartbeat of a rank, and when this process read a change of it (``time.monotonic()``)."""

    heartbeat: Heartbeat
    received_at: float
    """Time of the last new heartbeat."""
    progressed_at: float
    """Time of the last phase change."""

    def update(self, heartbeat: Heartbeat, now: float) -> None:
        """Replace the heartbeat by the one that was read at ``now``."""
        if heartbeat.count != self.heartbeat.count:
            self.received_at = now
        if heartbeat.changes != self.heartbeat.changes:
            self.progressed_at = now
        self.heartbeat = heartbeat


def find_behind(ranks: dict[int, RankStatus], now: float, limit: float, interval: float) -> list[int]:
    """Return the ranks that the others wait for; none if one has progressed within ``limit`` seconds."""
    if now - max(status.progressed_at for status in ranks.values()) < limit:
        return []
    silent = [rank for rank, status in ranks.items() if now - status.received_at > max(limit / 2, 4 * interval)]
    if silent:
        return silent
    last_step = max(status.heartbeat.step for status in ranks.values())
    if slower := [rank for rank, status in ranks.items() if status.heartbeat.step < last_step]:
        return slower
    # Not by the clock: a rank may begin its work when the others already wait for it.
    alone = [rank for rank, status in ranks.items() if status.heartbeat.phase in _ALONE]
    if alone and any(status.heartbeat.phase == "waiting" for status in ranks.values()):
        return alone
    latest = max(ranks.values(), key=lambda status: status.heartbeat.entered)
    return [rank for rank, status in ranks.items() if status.heartbeat.phase != latest.heartbeat.phase]


def describe(ranks: dict[int, RankStatus], behind: list[int], now: float) -> str:
    """Return one sentence for each rank that is behind, and the phases of the other ranks."""
    lines = []
    for rank in behind[:_MAX_RANKS_SHOWN]:
        status = ranks[rank]
        heartbeat = status.heartbeat
        silent_for = now - status.received_at
        silence = f", and has sent no heartbeat for {silent_for:.0f} s" if silent_for > _SILENT_SECONDS else ""
        lines.append(
            f"rank {rank} (process {heartbeat.pid} on {heartbeat.host}) has been in step {heartbeat.step}, phase "
            f"'{heartbeat.phase}', for {now - status.progressed_at:.0f} s{silence}{_process_state(heartbeat)}"
        )
    if len(behind) > _MAX_RANKS_SHOWN:
        lines.append(f"and {len(behind) - _MAX_RANKS_SHOWN} more ranks: {behind[_MAX_RANKS_SHOWN:]}")
    phases = sorted({(s.heartbeat.step, s.heartbeat.phase) for rank, s in ranks.items() if rank not in behind})
    waiting = ", ".join(f"step {step}, phase '{phase}'" for step, phase in phases)
    return "; ".join(lines) + f"; the other ranks wait in {waiting}"


def _process_state(heartbeat: Heartbeat) -> str:
    """Return the kernel's state of a process in words. Empty if it runs, or runs on another machine."""
    if heartbeat.host != socket.gethostname():
        return ""
    try:
        state = Path(f"/proc/{heartbeat.pid}/stat").read_text(encoding="latin-1").rpartition(")")[2].split()[0]
    except OSError:
        return ": it has exited"
    descriptions = {
        "T": f": it is stopped (kill -CONT {heartbeat.pid} resumes it)",
        "D": ": it waits for a disk",
        "Z": ": it has exited",
    }
    return descriptions.get(state, "")


class Watchdog:
    """Threads that end a hung run with exit code 4; stack traces go to ``hang/rank_N.txt``. Inactive with one rank."""

    def __init__(self, run: RunConfig) -> None:
        self._folder = Path(run.output_dir) / "hang"
        self._collective_limit = 60 * (run.hang_minutes or _SHARE_OF_TIMEOUT * run.timeout_minutes)
        self._alone_limit = 60 * (run.hang_minutes or _SHARE_OF_TIMEOUT * run.wait_minutes)
        self._interval = min(10.0, self._collective_limit / 20)
        self._closed = threading.Event()
        self.ranks: dict[int, RankStatus] = {}
        self._read_at = 0.0
        self._is_hang_reported = False

    def start(self) -> None:
        """Start the threads; all ranks must call it. It needs the store at MASTER_ADDR, and no process group."""
        self._rank = int(os.environ["RANK"])
        self._world = int(os.environ["WORLD_SIZE"])
        if self._world == 1:
            return
        # A separate connection: a client of the store serves one thread at a time, and a thread may wait long.
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=60),
            wait_for_workers=False,
        )
        self._send_heartbeat(0)
        # Afterwards every key exists, so that no read blocks.
        self._store.wait([self._key(rank) for rank in range(self._world)])
        self._read_heartbeats()
        for work in (self._exchange_heartbeats, self._watch):
            threading.Thread(target=work, name="watchdog", daemon=True).start()

    def close(self) -> None:
        """Stop the threads."""
        self._closed.set()

    @property
    def limit(self) -> float:
        """Seconds without progress that count as a hang, in the current phases of the ranks."""
        phases = {PROGRESS.phase, *(status.heartbeat.phase for status in list(self.ranks.values()))}
        return self._alone_limit if phases & _ALONE else self._collective_limit

    def _key(self, rank: int) -> str:
        return f"megatron_dppo/beat/{rank}"

    def _send_heartbeat(self, count: int) -> None:
        self._store.set(self._key(self._rank), json.dumps(vars(Heartbeat.current(count))))

    def _read_heartbeats(self) -> None:
        values = self._store.multi_get([self._key(rank) for rank in range(self._world)])
        now = time.monotonic()
        for rank, value in enumerate(values):
            heartbeat = Heartbeat(**json.loads(value))
            status = self.ranks.setdefault(rank, RankStatus(heartbeat, received_at=now, progressed_at=now))
            status.update(heartbeat, now)
        self._read_at = now

    def _exchange_heartbeats(self) -> None:
        count = 0
        while not self._closed.wait(self._interval):
            count += 1
            try:
                self._send_heartbeat(count)
                self._read_heartbeats()
                self._is_hang_reported = self._store.check([_HANG_KEY])
            except (RuntimeError, dist.DistError):
                # The process that hosts the store has exited. That is the launcher, which ends all ranks, or rank 0,
                # whose exit makes the collectives of the other ranks fail.
                return

    def _watch(self) -> None:
        changes = PROGRESS.changes
        progressed_at = time.monotonic()
        while not self._closed.wait(self._interval):
            now = time.monotonic()
            if PROGRESS.changes != changes:
                changes = PROGRESS.changes
                progressed_at = now
            behind = find_behind(self.ranks, now, self.limit, self._interval)
            if self._is_hang_reported:
                self._abort("")
            elif now - self._read_at > self.limit and now - progressed_at > self.limit:
                self._abort(self._describe_unresponsive_store(now))
            elif behind and now - self._read_at < 4 * self._interval and self._is_reporter(behind):
                self._abort(describe(self.ranks, behind, now))

    def _is_reporter(self, behind: list[int]) -> bool:
        """Return True if this rank reports: the first one that is not behind."""
        return self._rank == min(set(range(self._world)) - set(behind), default=min(behind))

    def _describe_unresponsive_store(self, now: float) -> str:
        """Return the report of a store whose host process, the launcher or rank 0, hangs.

        Without the store no rank knows whether another one reports. Rank 1 and the first rank of each node do.
        """
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        if self._rank != 1 and os.environ.get("LOCAL_RANK") != "0":
            return ""
        heartbeat = self.ranks[0].heartbeat
        return (
            f"the store at {address}, hosted by rank 0 (process {heartbeat.pid} on {heartbeat.host}) or the launcher, "
            f"has not responded for {now - self._read_at:.0f} s{_process_state(heartbeat)}; this rank waits in step "
            f"{PROGRESS.step}, phase '{PROGRESS.phase}'"
        )

    def _abort(self, text: str) -> None:
        """Write the stack traces, print ``text`` if this rank reports, and exit: the main thread blocks forever."""
        with suppress(OSError):
            self._folder.mkdir(exist_ok=True)
            with (self._folder / f"rank_{self._rank:05d}.txt").open("w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        if text:
            print(
                f"\n[rank {self._rank}] error: the run hangs: no rank has entered a new phase for {self.limit / 60:g} "
                f"minutes (run.hang_minutes). {text}. The stack traces of the ranks that respond are in "
                f"{self._folder}. Run the same command to resume from the last checkpoint",
                file=sys.stderr,
                flush=True,
            )
            # In a thread, since the store may not respond.
            threading.Thread(target=self._publish_hang, daemon=True).start()
        # The launcher kills all ranks when the first one exits. The pause gives every rank the time to read the hang
        # key and to write its stack trace. A main thread whose collective fails meanwhile exits with this code too.
        atexit.register(os._exit, EXIT_CODE)
        time.sleep((8 if text else 4) * self._interval)
        os._exit(EXIT_CODE)

    def _publish_hang(self) -> None:
        with suppress(RuntimeError):
            self._store.set(_HANG_KEY, "hangs")

"""One schedule from its start to its end: servers, faults, and the lives of a trainer that is killed and resumed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from megatron_dppo.errors import TrainingStopped, UserError
from megatron_dppo.report.clock import Clock
from megatron_dppo.rollout.batch import CollectedRollouts
from megatron_dppo.rollout.scheduler import RolloutScheduler
from megatron_dppo.run.gpus import Gpus, build_gpus, free_gpus
from megatron_dppo.run.guard import FirstUpdateGuard, count_nonfinite_tokens
from megatron_dppo.setup.engines import build_engine, build_publisher, connect_servers
from megatron_dppo.weights.ipc import MemorySharing
from megatron_dppo_engines.servers.updates import RELEASED
from tests.faults.simulation import invariants, seams
from tests.faults.simulation.broadcast import Broadcasts
from tests.faults.simulation.chaos import Chaos
from tests.faults.simulation.clock import Killed, Stuck, VirtualLoop
from tests.faults.simulation.faults import Plan
from tests.faults.simulation.network import Life, Network, Node
from tests.faults.simulation.outcome import Outcome
from tests.faults.simulation.server import SimServer
from tests.faults.simulation.trainer import (
    HF_CONFIG,
    Prompts,
    Saved,
    Scorer,
    SimTrainer,
    Tokenizer,
    configure,
    fresh_weights,
)
from tests.faults.simulation.watch import Watch
from tests.unit.streams import stream_of

_LONGEST = 48 * 3600.0
"""Virtual seconds of a run. Each call has a deadline of at most an hour, and is made a few times at most."""
_MOST_ROUNDS = 200_000
_INPUTS = SimpleNamespace(
    hf_config=HF_CONFIG, tokenizer=Tokenizer(), train_prompts=Prompts(), layout=SimpleNamespace(dp=1), eval_prompts={}
)
_PLATFORM: Any = SimpleNamespace(device=torch.device("cpu"))


def simulate(plan: Plan, note: Callable[[str], None] | None = None) -> Outcome:
    """Run a schedule.

    Args:
        plan: the schedule.
        note: gets each event as a line.
    """
    run = _Run(plan, note)
    try:
        run.run()
    finally:
        run.close()
    return run.outcome


class _Run:
    def __init__(self, plan: Plan, note: Callable[[str], None] | None) -> None:
        self.plan, self.outcome = plan, Outcome(plan)
        random.seed(plan.seed)
        self.loop = VirtualLoop(_LONGEST, _MOST_ROUNDS)
        self.loop.set_task_factory(seams.make_task)
        self._sink = note
        self._note = None if note is None else self._timed
        self.disk: dict[str, dict[str, bytes]] = {}
        initial = fresh_weights("initial", plan.seed)
        self.nodes = [self._node(i, initial) for i in range(plan.servers)]
        broadcasts = Broadcasts(self.loop)
        self.chaos = Chaos(self.loop, self.nodes, broadcasts, self._note)
        self.network = Network(
            self.loop,
            {f"s{node.place}:80": node for node in self.nodes},
            broadcasts,
            seed=plan.seed,
            latency=plan.latency,
            note=self._note,
            apply=self.chaos.apply,
        )
        self.broadcasts = broadcasts
        self.died: set[int] = set()
        """servers that ended by what they were asked for"""
        for node in self.nodes:
            node.server.die = lambda reason, node=node: self._dies(node, reason)
        self.config = configure(plan)
        self.digests: dict[int, int] = {}
        self.trained: dict[int, list[int]] = {}
        self.left_out: dict[int, int] = {}
        self.held: dict[str, list[list[int]]] = {}
        self.saved = Saved(0, initial)
        self.names: set[str] = set()
        self.published: dict[int, float] = {}
        """when the publish of each version began"""
        seams.NOW.loop, seams.NOW.network, seams.NOW.disk = self.loop, self.network, self.disk
        seams.NOW.names, seams.NOW.foreign, seams.NOW.taken = itertools.count(1), {}, []
        seams.NOW.started = []

    def _node(self, place: int, initial: dict[str, bytes]) -> Node:
        server = SimServer(
            self.loop,
            f"http://s{place}:80",
            version=self.plan.engine_version,
            token_seconds=self.plan.token_seconds,
            initial=initial,
            disk=self.disk,
        )
        return Node(place, server)

    def _timed(self, text: str) -> None:
        assert self._sink is not None
        self._sink(f"{self.loop.time():10.3f}  {text}")

    def say(self, text: str) -> None:
        if self._note is not None:
            self._note(text)

    def run(self) -> None:
        self.chaos.arm(self.plan.faults)
        outcome = self.outcome
        while True:
            try:
                self._live()
                outcome.end = "done"
            except Killed:
                self.say("the trainer is killed")
                self._bury()
                outcome.lives += 1
                continue
            except UserError as error:
                outcome.end = f"{type(error).__name__}: {error}"
            except Stuck as error:
                outcome.end = "stuck"
                outcome.violations.append(str(error))
            except Exception as error:
                outcome.end = f"{type(error).__name__}: {error}"
                last = "".join(traceback.format_tb(error.__traceback__)[-3:])
                outcome.violations.append(f"an error that is none for the user: {outcome.end}\n{last}")
            break
        self.say(f"END {outcome.end}")
        outcome.happened = self.chaos.happened
        outcome.seconds, outcome.rounds = self.loop.time(), self.loop.rounds
        outcome.violations += [*self._ended_well(), *seams.NOW.taken]

    def _ended_well(self) -> Iterator[str]:
        if self.outcome.end == "done":
            assert self.saved.stream is not None
            yield from invariants.check_prompts(self.trained, self.saved.stream, sum(self.left_out.values()))
        elif reason := invariants.must_finish(self.plan, self.outcome.happened, self.died):
            yield f"the run stopped, {reason}: {self.outcome.end}"

    def _dies(self, node: Node, reason: str) -> None:
        """Only the messages of a dead trainer, and those that the network spoils, may make it do that."""
        if self.outcome.lives == 1 and all(fault.server != node.place for fault in self.chaos.happened):
            self.outcome.violations.append(f"server {node.place} ended: {reason}")
        self.died.add(node.place)
        self.chaos.dies(node, reason)

    def _bury(self) -> None:
        seams.NOW.life.dead = True
        self.loop.cancel_all()
        self.broadcasts.gone(None)

    def close(self) -> None:
        """Nothing of this run goes on."""
        seams.NOW.life.dead = True
        for node in self.nodes:
            node.server.stop()
        with contextlib.suppress(Killed, Stuck):
            self.loop.cancel_all()
        self.loop._ready.clear()  # type: ignore[attr-defined]
        self.loop.close()

    # one life of the trainer

    def _live(self) -> None:
        saved, plan, config = self.saved, self.plan, self.config
        trainer = SimTrainer(dict(saved.weights), saved.step)
        watch = Watch(plan, trainer, self.names, self.outcome.violations, self.loop.time)
        seams.NOW.life = Life(watch)
        seams.NOW.trainer = trainer
        self.digests = {v: d for v, d in self.digests.items() if v < saved.step} | {saved.step: trainer.digest}
        for record in (self.trained, self.left_out):
            for step in [s for s in record if s >= saved.step]:
                del record[step]
        self._released(lambda: free_gpus(config.rollout, None))
        engine = build_engine(
            config.rollout, config.train, _INPUTS, trainer, _PLATFORM, connect_servers(config.rollout), None
        )
        publisher = build_publisher(config, _INPUTS, trainer, engine, _PLATFORM, self._sharing())
        publisher._sync._broadcasts._transport = self.broadcasts
        publisher._probe._expected["enough_tokens"] = 1  # one answer says enough where all numbers are exact
        self._watch_publish(publisher, engine, trainer, watch)
        stream = stream_of(config, _INPUTS.train_prompts, SimTrainer.groups, 0, 1, engine, Scorer())
        if saved.stream is not None:
            stream.restore(saved.stream, saved.contents)
        self.held = invariants.held_tokens(saved.contents)
        gpus = build_gpus(config.rollout, trainer, publisher)
        self._publish(gpus.for_sampling())
        for step in range(saved.step, plan.steps):
            self._step(stream, step, trainer, gpus)

    def _sharing(self) -> MemorySharing | None:
        """Return buckets of the method ``ipc``, each of one tensor: the model is far smaller than a megabyte."""
        if self.plan.method != "ipc":
            return None
        owners = {node.server.url: [0] for node in self.nodes}
        return MemorySharing(owners, bucket_bytes=1, dtype=torch.float32, tied=False, group=None)

    def _watch_publish(self, publisher: Any, engine: Any, trainer: SimTrainer, watch: Watch) -> None:
        """Have each publish watched, from its first call to the servers that it lets sample."""
        publish, attempt = publisher.publish, publisher._attempt
        watch.pool = engine.pool

        def attempt_watched(*args: Any, is_last: bool, **options: Any) -> Any:
            watch.is_last_attempt = is_last
            return attempt(*args, is_last=is_last, **options)

        def publish_watched() -> list[str]:
            watch.begin_publish()
            # From here on: a server that is proved early may change while the others are tried again.
            self.published[trainer.policy_version] = self.loop.time()
            notes: list[str] = publish()
            synced = [server.url for server in engine.pool.servers if server.is_synced]
            watch.end_publish([url.removeprefix("http://") for url in synced])
            return notes

        publisher.publish, publisher._attempt = publish_watched, attempt_watched

    def _publish(self, notes: Sequence[str]) -> None:
        for text in notes:
            self.say(f"published: {text}")

    def _released(self, release: Callable[[], list[str]]) -> None:
        """Afterwards each colocated server has released its memory, or is named, or is another process, or has the name
        of one that has: a trainer was killed between the name and the call."""
        births = [node.births for node in self.nodes]
        notes = release()
        for text in notes:
            self.say(f"released: {text}")
        for node, born in zip(self.nodes, births, strict=True):
            server = node.server
            excused = any(server.url in note for note in notes) or (self.outcome.lives > 1 and server.label == RELEASED)
            if self.plan.colocated and node.up and node.births == born and not excused and len(server.released) < 2:
                self.outcome.violations.append(f"the trainer has the GPUs, and server {node.place} its memory")

    def _step(self, stream: RolloutScheduler, step: int, trainer: SimTrainer, gpus: Gpus) -> None:
        collected = stream.collect(step, trainer.policy_version, Clock())
        wrong = self._examine(collected, step)
        if self.plan.order == "stream" and self.plan.staleness and not (self.plan.stopping or self.plan.dynamic):
            trained = [int(group.prompt.prompt_id) for group in collected.groups]
            self.outcome.violations += invariants.check_order(trained, stream.state())
        self._guard(collected, trainer, wrong)
        self.trained[step] = [int(group.prompt.prompt_id) for group in collected.groups]
        self.left_out[step] = sum(collected.dropped_groups.values())
        self.say(f"step {step} trains on {self.trained[step]}")
        self._released(gpus.for_training)
        self.loop.run(asyncio.sleep(self.plan.train_seconds))
        # Another life learns something else from the same prompts.
        tokens = ([tuple(r.completion.token_ids.tolist()) for r in g.rollouts] for g in collected.groups)
        trainer.learn([self.outcome.lives, *tokens])
        stream.wait_before_update(Clock())
        self.digests[trainer.policy_version] = trainer.digest
        self._publish(gpus.after_update(samples_next=True))
        if (step + 1) % self.plan.save_every and step + 1 < self.plan.steps:
            return
        contents = {stored.position: stored for stored in stream.stored_rollouts()}
        self.saved = Saved(step + 1, dict(trainer.weights), stream.state(), contents)

    def _guard(self, collected: CollectedRollouts, trainer: SimTrainer, wrong: list[str]) -> None:
        """The guard of the first update, as ``PolicyUpdater.step`` has it; what it lets through has trained."""
        dropped = count_nonfinite_tokens(collected.groups)
        share = float(dropped.numerator) / max(float(dropped.denominator), 1.0)
        on_policy = max(collected.token_ages, default=0) == 0
        config = self.config
        guard = FirstUpdateGuard.from_config(
            config.train, config.rollout, config.model, nonfinite_fraction=share, is_on_policy=on_policy
        )
        difference = trainer.difference(collected.groups)
        oldest = trainer.policy_version - max(collected.token_ages, default=0)
        lying = invariants.lies_since(self.chaos.begun, self.published.get(oldest, 0.0))
        try:
            guard({"abs_prob_diff": difference})
        except TrainingStopped:
            self.outcome.guard_only = wrong
            if not wrong:
                self.outcome.violations.append("the guard stopped a step in which nothing was wrong")
            elif not lying:
                self.outcome.violations.append(f"the guard alone held what no lie after the last sync made: {wrong[0]}")
            raise
        unseen = invariants.unseen(wrong, lying, on_policy, difference)
        self.outcome.unseen += unseen
        self.outcome.violations += [text for text in wrong if text not in unseen]
        for text in wrong:
            self.say(f"WRONG {text}")

    def _examine(self, collected: CollectedRollouts, step: int) -> list[str]:
        plan = self.plan
        age = plan.partial + plan.staleness
        versions = range(max(0, step - age), step + 1)
        wrong = list(invariants.check_groups(collected.groups, plan.siblings, plan.prompts))
        for group in collected.groups:
            for rollout in group.rollouts:
                self.outcome.tokens += len(rollout.completion.token_ids)
                for text in invariants.check_completion(group.prompt, rollout.completion, self.digests, versions, plan):
                    wrong.append(f"step {step}, prompt {group.prompt.prompt_id}: {text}")
            self.outcome.violations += invariants.check_scores(group)
            self.outcome.violations += invariants.check_continued(group, self.held)
        self.outcome.violations += invariants.check_ages(collected, step)
        self.outcome.violations += invariants.check_surplus(collected, plan)
        return wrong

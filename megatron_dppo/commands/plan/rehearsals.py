"""Rehearsals of many ranks by a few processes, of all layers of a model or of so few that the rest follows."""

from __future__ import annotations

import copy
import os
import pickle
import queue
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import Any

from megatron_dppo.commands.plan.child import Question
from megatron_dppo.commands.plan.measured import extrapolate
from megatron_dppo.errors import PlanError

_FEW = (2, 3)
"""Layers of a chunk that are rehearsed when the others follow from them."""


class Rehearsals:
    """Processes that rehearse, started when there is something to do and ended at the end of the block.

    Args:
        jobs: at a time.
    """

    def __init__(self, jobs: int) -> None:
        self._idle: queue.SimpleQueue[subprocess.Popen[bytes] | None] = queue.SimpleQueue()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._threads = ThreadPoolExecutor(max_workers=jobs)
        for _ in range(jobs):
            self._idle.put(None)

    def __enter__(self) -> Rehearsals:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # Questions that nobody waits for any more are not asked, and those under way are not waited for.
        for process in self._processes if error is not None else ():
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            with process:
                assert process.stdin is not None
                process.stdin.close()

    def ask(self, questions: Sequence[Question], *, few_layers: bool = False) -> list[Any]:
        """The ``Measured`` of each question.

        Args:
            questions: what is rehearsed.
            few_layers: rehearse 2 and 3 layers of each chunk, and compute what all of them need; the layers of the
                model have to be alike.

        Raises:
            PlanError: a rank cannot be rehearsed, or its code fails; with the reason.
        """
        if not few_layers:
            return list(self._threads.map(self._ask, questions))
        asked = [_with_layers(question, few) for question in questions for few in _FEW]
        found, answers = list(self._threads.map(self._ask, asked)), []
        for i, question in enumerate(questions):
            chunks = question.layout.pp * question.layout.vpp
            layers = question.hf_config.num_hidden_layers // chunks
            answers.append(extrapolate(dict(zip(_FEW, found[2 * i : 2 * i + 2], strict=True)), layers))
        return answers

    def _ask(self, question: Question) -> Any:
        process = self._idle.get() or self._start()
        assert process.stdin is not None and process.stdout is not None
        try:
            pickle.dump(question, process.stdin)
            process.stdin.flush()
            answer = pickle.load(process.stdout)  # from our own process
        except (EOFError, BrokenPipeError) as error:
            self._idle.put(None)
            raise PlanError(f"the process of a rehearsal ended with exit code {process.wait()}") from error
        self._idle.put(process)
        if isinstance(answer, str):
            raise PlanError(f"rank {question.role.rank} of {question.layout} cannot be rehearsed: {answer}")
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        # What would tell it of a run that this process is part of must not reach it.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
        command = [sys.executable, "-W", "ignore", "-m", "megatron_dppo.commands.plan.child"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self._processes.append(process)
        return process


def _with_layers(question: Question, layers: int) -> Question:
    """The same with a model of so few layers a chunk."""
    model = copy.deepcopy(question.hf_config)
    model.num_hidden_layers = layers * question.layout.pp * question.layout.vpp
    if getattr(model, "layer_types", None):
        model.layer_types = model.layer_types[: model.num_hidden_layers]
    return replace(question, hf_config=model)

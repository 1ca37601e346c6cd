"""The process that rehearses ranks.

Started as ``python -m megatron_dppo.commands.plan.child``; questions come in and answers go out pickled.

It imports everything once and forks for each question: a rehearsed rank leaves its process good for nothing else.
"""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from dataclasses import dataclass
from typing import IO, Any

from megatron_dppo.commands.plan.machine import GpuNode
from megatron_dppo.commands.plan.rehearse import Role, prepare, rehearse
from megatron_dppo.config.layout import Layout
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import UserError

_LINES = 30
"""of what a rank said before it failed"""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is rehearsed."""

    config: Config
    hf_config: Any
    layout: Layout
    role: Role
    machine: GpuNode
    teacher: Any = None
    """the transformers config of the teacher whose divergence is in the loss"""


def main() -> None:
    """Answer the questions of the standard input, each by a ``Measured`` or by the text of what is wrong."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print must not mix with the answers
    prepare()
    while True:
        try:
            question: Question = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answers.write(_answer(question))
        answers.flush()


def _answer(question: Question) -> bytes:
    """Pickled, by a fork of this process."""
    with tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as said:
        child = os.fork()
        if child == 0:
            os.dup2(said.fileno(), sys.stderr.fileno())
            os.dup2(said.fileno(), sys.stdout.fileno())
            _rehearse(question, answer)
        _, status = os.waitpid(child, 0)
        if status == 0:
            answer.seek(0)
            return answer.read()
        said.seek(0)
        lines = said.read().decode(errors="replace").strip().splitlines()
        code = os.waitstatus_to_exitcode(status)
    return pickle.dumps(f"its process ended with exit code {code}:\n" + "\n".join(lines[-_LINES:]))


def _rehearse(question: Question, answer: IO[bytes]) -> None:
    """Of the fork; does not return."""
    machine, code = question.machine, 1

    def seconds(flops: int, dtype: Any, moved: int) -> float:
        return machine.seconds_of(flops, str(dtype).removeprefix("torch."), moved)

    try:
        try:
            found: Any = rehearse(
                question.config, question.hf_config, question.layout, question.role, seconds, question.teacher
            )
        except UserError as error:
            found = str(error)
        answer.write(pickle.dumps(found))
        answer.flush()
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)  # fake process groups have nothing to leave


if __name__ == "__main__":
    main()

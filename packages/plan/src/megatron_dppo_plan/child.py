"""Worker that rehearses ranks: ``python -m megatron_dppo_plan.child``, with pickles on stdin and stdout.

It imports everything once and forks for each request: a rehearsal patches classes and starts fake process groups.
"""

import os
import pickle
import sys
import tempfile
import traceback
from dataclasses import dataclass
from typing import IO, Any

from megatron_dppo.config.layout import Layout
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import UserError
from megatron_dppo_plan.machine import GpuNode
from megatron_dppo_plan.rehearse import RankRole, prepare, rehearse

_NUM_LOG_LINES = 30
"""Lines of a failed rank's output in the error."""


@dataclass(frozen=True, kw_only=True)
class RehearsalRequest:
    """One update of one rank to rehearse."""

    config: Config
    hf_config: Any
    layout: Layout
    role: RankRole
    machine: GpuNode
    teacher: Any = None
    """Transformers config of the teacher whose divergence is in the loss. None without one."""


def main() -> None:
    """Respond to each request on stdin with an ``UpdateMeasurement``, or with the text of an error."""
    responses = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # Output of libraries must not mix with the responses.
    prepare()
    while True:
        try:
            request: RehearsalRequest = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        responses.write(_run_in_fork(request))
        responses.flush()


def _run_in_fork(request: RehearsalRequest) -> bytes:
    """Return the pickled response, computed by a fork of this process."""
    with tempfile.TemporaryFile() as response, tempfile.TemporaryFile() as log:
        child = os.fork()
        if child == 0:
            os.dup2(log.fileno(), sys.stderr.fileno())
            os.dup2(log.fileno(), sys.stdout.fileno())
            _rehearse_and_exit(request, response)
        _, status = os.waitpid(child, 0)
        if status == 0:
            response.seek(0)
            return response.read()
        log.seek(0)
        lines = log.read().decode(errors="replace").strip().splitlines()
        code = os.waitstatus_to_exitcode(status)
    return pickle.dumps(f"its process exited with code {code}:\n" + "\n".join(lines[-_NUM_LOG_LINES:]))


def _rehearse_and_exit(request: RehearsalRequest, response: IO[bytes]) -> None:
    machine = request.machine
    code = 1

    def seconds(flops: int, dtype: Any, moved: int) -> float:
        return machine.operation_seconds(flops, str(dtype).removeprefix("torch."), moved)

    try:
        try:
            result: Any = rehearse(
                request.config, request.hf_config, request.layout, request.role, seconds, request.teacher
            )
        except UserError as error:
            result = str(error)
        # Megatron and torch raise errors of many kinds for what fake tensors cannot compute.
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            result = f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
        response.write(pickle.dumps(result))
        response.flush()
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)  # Skip the teardown of fake process groups.


if __name__ == "__main__":
    main()

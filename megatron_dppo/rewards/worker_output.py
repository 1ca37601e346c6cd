"""Output of scoring processes: passed on to the trainer's own streams, up to a number of bytes."""

import os
import selectors
import threading
from contextlib import suppress
from multiprocessing.connection import Connection

_SAMPLE_BYTES = 16 << 10
"""Bytes of each stream that are passed on for each sample."""
_STEP_BYTES = 1 << 20
"""Bytes of each stream that are passed on from one process in each step."""
_READ_BYTES = 1 << 16
_STREAMS = (1, 2)


class WorkerOutput:
    """Reader of what one process and its children print, from the reading ends of its stdout and stderr.

    A function that prints megabytes for each sample would fill the disk with the log of a run.
    """

    def __init__(self, readers: tuple[Connection, Connection]) -> None:
        self._readers = readers
        self._lock = threading.Lock()
        self._sample_left = dict.fromkeys(_STREAMS, _SAMPLE_BYTES)
        self._step_left = dict.fromkeys(_STREAMS, _STEP_BYTES)
        self._is_noted = False
        threading.Thread(target=self._pass_on, name="reward-output", daemon=True).start()

    def begin_step(self) -> None:
        """Allow the output of another step."""
        with self._lock:
            self._step_left = dict.fromkeys(_STREAMS, _STEP_BYTES)
            self._is_noted = False

    def begin_samples(self, count: int) -> None:
        """Allow the output of some samples, which are scored together."""
        with self._lock:
            self._sample_left = dict.fromkeys(_STREAMS, _SAMPLE_BYTES * count)

    def _pass_on(self) -> None:
        with selectors.DefaultSelector() as selector:
            for stream, reader in zip(_STREAMS, self._readers, strict=True):
                selector.register(reader.fileno(), selectors.EVENT_READ, stream)
            while selector.get_map():
                for key, _ in selector.select():
                    data = os.read(key.fd, _READ_BYTES)
                    if not data:
                        selector.unregister(key.fd)
                    # A stream of the trainer that is closed or full must not end the reading: writers would block.
                    with suppress(OSError):
                        self._write(key.data, data)
        for reader in self._readers:
            reader.close()

    def _write(self, stream: int, data: bytes) -> None:
        with self._lock:
            allowed = data[: max(0, min(self._sample_left[stream], self._step_left[stream]))]
            self._sample_left[stream] -= len(allowed)
            self._step_left[stream] -= len(allowed)
            has_note = len(allowed) < len(data) and not self._is_noted
            self._is_noted = self._is_noted or has_note
        os.write(stream, allowed)
        if has_note:
            note = (
                f"\nwarning  rewards: more output of a reward function is left out in this step (a scoring process may "
                f"print {_SAMPLE_BYTES >> 10} KiB a sample and {_STEP_BYTES >> 20} MiB a step)\n"
            )
            os.write(2, note.encode())

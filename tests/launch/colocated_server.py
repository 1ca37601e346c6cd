"""A stand-in for SGLang on the trainer's node: ``python -m tests.launch.colocated_server FOLDER RELEASES --model-path M
--host H --port P ...``, as ``megatron-dppo serve`` calls it.

It samples from the weights that it was sent, and loses them with its memory. Used without memory, or asked twice to
release or take it, it ends, as SGLang's scheduler does. ``FOLDER/calls-H`` gets a word for its start and for each call
of ``NOTED``. In its first life it is killed when it has released its memory RELEASES times.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.faults.kill_points.sglang_stub import Server, handler

NOTED = {
    "/release_memory_occupation": "release",
    "/resume_memory_occupation": "take",
    "/end_weight_update": "weights",
    "/update_weights_from_disk": "weights",
    "/generate": "generate",
}


class ColocatedServer(Server):
    """``Server`` whose memory can be released."""

    def __init__(self, model: Path, calls: Path, releases: int) -> None:
        super().__init__(model)
        self._calls = calls
        self._left = -1 if calls.exists() else releases
        self._away: set[str] = set()
        self._note("start")

    def _note(self, word: str) -> None:
        with self._calls.open("a") as file:
            file.write(f"{word}\n")

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        """See ``Server``."""
        path = path.partition("?")[0]
        if path in NOTED:
            self._note(NOTED[path])
        return super().answer(path, body)

    def on_release_memory_occupation(self, body: dict[str, Any]) -> Any:
        if self._away & set(body["tags"]):
            _end("released twice")
        self._away |= set(body["tags"])
        self.weights, self.engine, self.is_loaded = {}, None, False
        self._left -= 1
        if self._left == 0:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()  # when it has answered
        return {"success": True}

    def on_resume_memory_occupation(self, body: dict[str, Any]) -> Any:
        if not self._away >= set(body["tags"]):
            _end("taken without being released")
        self._away -= set(body["tags"])
        return {"success": True}

    def on_generate(self, body: dict[str, Any]) -> Any:
        if self._away:
            _end("used without memory")
        return super().on_generate(body)

    def _take(self, tensors: Any) -> None:
        if "weights" in self._away:
            _end("sent weights without memory for them")
        super()._take(tensors)


def _end(why: str) -> None:
    print(why, flush=True)
    os._exit(1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("releases", type=int)
    parser.add_argument("--model-path", type=Path)
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    options, _ = parser.parse_known_args(sys.argv[1:])
    server = ColocatedServer(options.model_path, options.folder / f"calls-{options.host}", options.releases)
    ThreadingHTTPServer((options.host, options.port), handler(server)).serve_forever()

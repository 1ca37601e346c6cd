"""A stand-in for an inference server: ``python server_stub.py FOLDER MODE --host H --port P ...``.

It writes what it was started with to ``FOLDER/started-PORT.json`` and answers /health and what SGLang says of itself.
MODE: ``serve``; ``stubborn`` ignores SIGINT; ``die`` prints and ends at once; ``die-later`` ends when ``FOLDER/die``
exists, ``die-once`` likewise and removes the file; ``slow`` never becomes healthy, ``slow-later`` not after it has died
so.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ANSWERS = {"/server_info": {"version": "0.5.23"}, "/model_info": {"model_path": "stub"}, "/health": {}}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        key = os.environ.get("STUB_KEY")
        allowed = key is None or self.path == "/health" or self.headers["Authorization"] == f"Bearer {key}"
        answer = ANSWERS.get(self.path) if allowed else {}
        status = 401 if not allowed else 404 if answer is None else 200
        slow = mode == "slow" or (mode == "slow-later" and (folder / "dead").exists())
        self.send_response(503 if slow else status)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: object) -> None:
        pass


def wait_for_death() -> None:
    while not (folder / "die").exists():
        time.sleep(0.05)
    if mode != "die-later":
        (folder / "die").unlink()
        (folder / "dead").touch()
    print("out of memory, key", os.environ.get("STUB_KEY"), flush=True)
    os._exit(7)


if __name__ == "__main__":
    folder, mode = Path(sys.argv[1]), sys.argv[2]
    arguments = sys.argv[3:]
    host, port = (arguments[arguments.index(name) + 1] for name in ("--host", "--port"))
    file = arguments[arguments.index("--config") + 1] if "--config" in arguments else None
    child = subprocess.Popen(["sleep", "1000"])
    started = {
        "arguments": arguments,
        "env": dict(os.environ),
        "config": Path(file).read_text() if file else None,
        "config_folder_mode": (Path(file).parent.stat().st_mode & 0o777) if file else None,
        "pids": [os.getpid(), child.pid],
    }
    (folder / f"started-{port}.json").write_text(json.dumps(started))
    print("loading", flush=True)
    if mode == "die":
        print("no such model", file=sys.stderr, flush=True)
        sys.exit(5)
    if mode == "stubborn":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if mode in ("die-later", "die-once", "slow-later"):
        threading.Thread(target=wait_for_death, daemon=True).start()
    ThreadingHTTPServer((host, int(port)), Handler).serve_forever()

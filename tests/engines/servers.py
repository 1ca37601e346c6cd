"""Starting and stopping real inference servers."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

from megatron_dppo_engines.serving.collectives import TESTED

TOOLS = Path(__file__).parents[2] / "tools" / "engines"
_START_SECONDS = 300


@dataclass
class Engine:
    """A running server. Its output is in ``log``: a pipe would be kept open by what it leaves behind."""

    url: str
    process: psutil.Process
    log: Path
    kind: str


def free_port() -> int:
    """A port of the loopback address that nobody uses.

    Below those that the kernel gives to outgoing connections: a server binds its port many seconds after this.
    """
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def start_engine(
    kind: str, command: Sequence[str], port: int, log: Path, env: Mapping[str, str] | None = None
) -> Engine:
    """Start a server and return at once; ``wait_ready`` waits."""
    with log.open("a") as output:
        process = psutil.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})}, start_new_session=True
        )
    return Engine(f"http://127.0.0.1:{port}", process, log, kind)


PROGRAMS = {"sglang": "sglang.launch_server", "vllm": "vllm.entrypoints.openai.api_server"}
IMPORTS = {
    "sglang": "sglang.srt.entrypoints.http_server,sglang.srt.models.qwen3_moe",
    "vllm": "vllm.entrypoints.openai.api_server,vllm.v1.worker.cpu_worker,vllm.model_executor.models.qwen3_moe",
}
"""Modules that a server imports by and by."""


@functools.cache
def _warm_engine(kind: str, version: str) -> subprocess.Popen[str]:
    """A process from which servers of one version are forked: importing an engine takes ten seconds."""
    program = " ".join((str(Path(__file__).parent / "warm_engine.py"), IMPORTS[kind], PROGRAMS[kind]))
    return subprocess.Popen(
        [TOOLS / f"{kind}.sh", "serve", version],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "ENGINE_PROGRAM": program},
        text=True,
    )


def fork_engine(kind: str, version: str, arguments: Sequence[str], port: int, log: Path) -> Engine:
    """Start a server as ``start_engine`` does, with the environment of this process."""
    warm = _warm_engine(kind, version)
    assert warm.stdin is not None and warm.stdout is not None
    print(json.dumps([str(log), *arguments]), file=warm.stdin, flush=True)
    return Engine(f"http://127.0.0.1:{port}", psutil.Process(int(warm.stdout.readline())), log, kind)


def has_ended(engine: Engine, seconds: float) -> bool:
    """Wait so long for the end of a server."""
    with contextlib.suppress(psutil.TimeoutExpired):
        engine.process.wait(seconds)
        return True
    return False


def wait_ready(engine: Engine) -> Engine:
    """Wait for /health, and until vLLM knows what /server_info says: it runs programs for it, once.

    Raises:
        RuntimeError: it ended, or did not answer in time; with the end of its log.
    """
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end and not has_ended(engine, 0.5):
        with contextlib.suppress(OSError), urllib.request.urlopen(engine.url + "/health", timeout=30) as answer:
            if answer.status == 200:
                if engine.kind == "vllm":
                    _get(engine.url + "/server_info?config_format=json")
                return engine
    stop_engine(engine)
    raise RuntimeError(f"{engine.url} did not start:\n" + engine.log.read_text(errors="replace")[-4000:])


def _get(url: str) -> None:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=120) as answer:
        answer.read()


def stop_engine(engine: Engine) -> None:
    """SIGINT to the launcher, whose children go with it; SIGKILL to its session when it does not obey."""
    with contextlib.suppress(psutil.NoSuchProcess):
        engine.process.send_signal(signal.SIGINT)
    has_ended(engine, 20)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(engine.process.pid, signal.SIGKILL)
    engine.process.wait()


class SharedEngine:
    """A server that tests share; it is started by the first of them that asks, and again after a ``stop``.

    Args:
        start: one that may not be ready yet.
    """

    def __init__(self, start: Callable[[], Engine]) -> None:
        self._start = start
        self._running: Engine | None = None

    def engine(self) -> Engine:
        """The server, ready."""
        if self._running is None:
            self._running = wait_ready(self._start())
        return self._running

    def stop(self) -> None:
        """Stop it, if it runs."""
        running, self._running = self._running, None
        if running is not None:
            stop_engine(running)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def start_server(
    kind: str, version: str, arguments: Sequence[str], port: int, log: Path, env: Mapping[str, str] | None
) -> Engine:
    """Start a server. One with variables of its own imports the engine anew: some of them are read by then."""
    if not env:
        return fork_engine(kind, version, arguments, port, log)
    return start_engine(kind, [str(TOOLS / f"{kind}.sh"), "serve", version, *arguments], port, log, env)


def start_sglang(
    model: Path, log: Path, *options: str, version: str = TESTED["sglang_newest"], env: Mapping[str, str] | None = None
) -> Engine:
    """A real SGLang server on the CPU."""
    port = free_port()
    arguments = ["--model-path", str(model)]
    arguments += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--context-length", "2048"]
    # By itself it takes a port that the kernel may give to a connection before it is bound.
    arguments += ["--nccl-port", str(free_port())]
    arguments += ["--max-running-requests", "64", "--log-level", "warning", *options]
    return start_server("sglang", version, arguments, port, log, env)


def start_lying_sglang(model: Path, log: Path, lie: Path, *options: str) -> Engine:
    """A real SGLang server that confirms weight updates and loads what the file ``lie`` says (``lying_sglang``)."""
    lie.touch()
    folder = Path(__file__).parent / "lying_sglang"
    return start_sglang(model, log, *options, env={"SGLANG_EXTRA_PATH": str(folder), "LYING_SGLANG": str(lie)})


@contextlib.contextmanager
def bf16_sglang(model: Path, log: Path) -> Iterator[Engine]:
    """An SGLang server in bf16, as ``megatron-dppo serve`` starts one, until the end of the context."""
    options = ("--dtype", "bfloat16", "--enable-return-routed-experts", "--enable-fp32-lm-head")
    engine = start_sglang(model, log, *options)
    try:
        yield wait_ready(engine)
    finally:
        stop_engine(engine)


def start_vllm(model: Path, log: Path, *options: str, env: Mapping[str, str] | None = None) -> Engine:
    """A real vLLM server on the CPU."""
    port = free_port()
    arguments = ["--model", str(model)]
    arguments += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "2048"]
    arguments += ["--max-num-seqs", "64", "--disable-uvicorn-access-log", *options]
    return start_server("vllm", TESTED["vllm"], arguments, port, log, env)

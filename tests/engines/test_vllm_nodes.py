"""A vLLM server over two nodes, each started by ``megatron-dppo serve``: two process trees on the loopback address."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo_engines.server import InferenceServer
from megatron_dppo_engines.serving.collectives import TESTED
from tests.engines.calls import LONG, ask, call
from tests.engines.servers import TOOLS, Engine, free_port
from tests.engines.tiny import Reference
from tests.engines.updates import by_broadcast, from_disk, off

ROOT = Path(__file__).parents[2]
_SECONDS = 300


def wait_until(is_true: Callable[[], bool], parts: list[subprocess.Popen[bytes]], folder: Path) -> None:
    """Wait for an event; a part that ends meanwhile fails with the output of all."""
    end = time.monotonic() + _SECONDS
    while not is_true():
        if time.monotonic() > end or any(part.poll() is not None for part in parts):
            logs = "\n".join(file.read_text(errors="replace")[-3000:] for file in sorted(folder.rglob("*.log")))
            raise AssertionError(logs)
        time.sleep(0.5)


class Nodes:
    """Two parts of one server.

    Args:
        model: Folder of the weights.
        folder: For logs and the files of addresses.
    """

    def __init__(self, model: Path, folder: Path) -> None:
        port, meeting = free_port(), free_port()
        options: dict[str, Any] = {"tensor-parallel-size": 2, "nnodes": 2, "max-model-len": 2048, "max-num-seqs": 64}
        lines = "\n".join(f"{name} = {value}" for name, value in options.items())
        config = folder / "config.toml"
        config.write_text(f'extends = "{ROOT}/examples/chain_sum/vllm.toml"\n[rollout.vllm]\n{lines}\n')
        self.folder = folder
        self.engine = Engine(f"http://127.0.0.1:{port}", None, folder / "0.log", "vllm")  # type: ignore[arg-type]
        self.parts = []
        for rank in (0, 1):
            command = [sys.executable, "-m", "megatron_dppo.commands.main", "serve", str(config)]
            command += ["--node-rank", str(rank), "--dist-init-addr", f"127.0.0.1:{meeting}"]
            command += ["--urls-file", str(folder / f"urls-{rank}"), "--log-dir", str(folder / f"logs-{rank}")]
            command += ["--rollout.servers.host", "127.0.0.1", "--rollout.servers.port", str(port)]
            command += ["--model.path", str(model)]
            command += ["--rollout.servers.command", f'["{TOOLS}/vllm.sh", "serve", "{TESTED["vllm"]}"]']
            command += ["--rollout.weight_sync.checksum_every", "0"]  # else the server reads no weights
            with (folder / f"serve-{rank}.log").open("wb") as log:
                self.parts.append(subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True))

    def wait(self) -> None:
        """Wait until both parts are healthy."""
        wait_until(lambda: all((self.folder / f"urls-{rank}").exists() for rank in (0, 1)), self.parts, self.folder)

    def says(self, rank: int, text: str) -> bool:
        """Return True if ``serve`` of a node printed a text."""
        return text in (self.folder / f"serve-{rank}.log").read_text()

    def stop(self) -> None:
        """Stop both parts, and kill what is left."""
        for part in self.parts:
            part.terminate()
        for part in self.parts:
            with contextlib.suppress(subprocess.TimeoutExpired):
                part.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(part.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def nodes(old_model: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    started = Nodes(old_model.folder, tmp_path_factory.mktemp("nodes"))
    try:
        started.wait()
        yield started
    finally:
        started.stop()


def test_weights_reach_the_ranks_of_both_nodes(nodes: Nodes, old_model: Reference, new_model: Reference) -> None:
    assert (nodes.folder / "urls-0").read_text() == nodes.engine.url + "\n"
    assert (nodes.folder / "urls-1").read_text() == "", "only node 0 answers requests"

    async def use(server: InferenceServer) -> None:
        assert (await server.info()).world_size == 2
        answer = await server.generate(ask(LONG, 30))
        assert off(old_model, answer, LONG) < 1e-5 < 0.1 < off(new_model, answer, LONG)
        digests = []
        for version, (model, other) in enumerate([(new_model, old_model), (old_model, new_model)] * 2):
            await server.pause()
            if version < 2:
                await by_broadcast(server, model, version, ranks=2)
            else:
                await from_disk(server, model, version)
            await server.resume()
            answer = await server.generate(ask(LONG, 30))
            assert off(model, answer, LONG) < 1e-5 < 0.1 < off(other, answer, LONG)
            assert [(span.policy_version, span.end) for span in answer.versions] == [(version, len(answer.token_ids))]
            digests.append(await server.weight_digests())
        assert [rank.tp_rank for rank in digests[0]] == [0, 1]
        assert [rank.digests for rank in digests[0]] == [rank.digests for rank in digests[2]]
        assert [rank.digests for rank in digests[1]] == [rank.digests for rank in digests[3]]
        assert all(a.digests != b.digests for a, b in zip(digests[0], digests[1], strict=True)), "new on both nodes"

    call(nodes.engine, use)


@pytest.mark.long
@pytest.mark.parametrize("dies", [0, 1])
def test_after_the_death_of_a_part_both_start_again(nodes: Nodes, old_model: Reference, dies: int) -> None:
    for rank in (0, 1):
        (nodes.folder / f"urls-{rank}").unlink(missing_ok=True)
    healthy = [(nodes.folder / f"serve-{rank}.log").read_text().count("is healthy") for rank in (0, 1)]
    # ``serve`` starts a server in a session of its own.
    children = subprocess.check_output(["pgrep", "-P", str(nodes.parts[dies].pid)], text=True).split()
    for child in children:
        os.killpg(int(child), signal.SIGKILL)

    async def fails(server: InferenceServer) -> None:
        with contextlib.suppress(Exception):
            await server.generate(ask(LONG, 30))

    call(nodes.engine, fails)  # node 0 notices by it that node 1 has ended
    wait_until(
        lambda: all(
            (nodes.folder / f"serve-{rank}.log").read_text().count("is healthy") > healthy[rank] for rank in (0, 1)
        ),
        nodes.parts,
        nodes.folder,
    )

    async def use(server: InferenceServer) -> None:
        assert off(old_model, await server.generate(ask(LONG, 30)), LONG) < 1e-5

    call(nodes.engine, use)

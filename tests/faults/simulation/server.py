"""A simulated SGLang server: weights, requests and control calls, in virtual time."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import pickle
from collections.abc import Callable, Mapping
from typing import Any

from tests.faults.simulation import model
from tests.faults.simulation.answers import Columns, Reply, Running, columns_of, encode

DONE = {"success": True}


class SimServer:
    """State and behavior of one server process.

    Args:
        loop: whose time it lives in.
        url: its address.
        version: of SGLang: 0.5.20 takes tensors without a session and sends the Top-K as nested lists.
        token_seconds: for one token of one request.
        initial: the weights of its model folder, by name.
        disk: folders with weights that trainer and servers share.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        url: str,
        *,
        version: str,
        token_seconds: float,
        initial: Mapping[str, bytes],
        disk: Mapping[str, Mapping[str, bytes]],
    ) -> None:
        self.url, self.version = url, version
        self.lie: Callable[[Columns, SimServer], Any] | None = None
        self.skip_update = self.stuck_label = self.silent_ranks = False
        self.spoil: str | None = None
        """what happens to the next tensor that arrives: one of ``SPOILS``"""
        self.slow = 1.0
        self.past: list[dict[str, bytes]] = [dict(initial)]
        """weights that it had, the initial ones first"""
        self.finished: list[Columns] = []
        self.die: Callable[[str], None] = lambda reason: None
        """called when the process ends of what it was asked for"""
        self._loop, self._seconds, self._initial, self._disk = loop, token_seconds, dict(initial), disk
        self._sessions = version >= "0.5.21"
        self.start(dict(initial), "default")

    def start(self, weights: dict[str, bytes], label: str) -> None:
        """A fresh process with these weights under this name."""
        self.weights, self.label = weights, label
        self.paused = self.open = False
        self.released: set[str] = set()
        """parts without memory"""
        self.group: Any = None
        self.running: dict[str, Running] = {}
        self.waiting: list[Running] = []

    def stop(self) -> None:
        """The process is gone; the network tells those who wait."""
        for request in self.running.values():
            if request.timer is not None:
                request.timer.cancel()
        self.running, self.waiting = {}, []

    @property
    def digest(self) -> int:
        """Version of the weights in use."""
        return model.digest_of(self.weights)

    def handle(self, path: str, body: Any, reply: Reply) -> None:
        """One call; ``reply`` is called now or later, or never when the process dies before."""
        name = path.strip("/").replace("/", "_")
        handler = getattr(self, f"_on_{name}", None)
        if handler is None:
            return reply(404, {"detail": f"no {path}"})
        if name == "generate":
            return self._on_generate(body, reply)
        answer = handler(body)
        reply(answer[0], answer[1]) if isinstance(answer, tuple) else reply(200, answer)

    # what it says of itself

    def _on_health(self, _: Any) -> Any:
        if self.released and not self.paused:
            self.die("a health check, which generates a token, of a server without memory")
        return (503, "") if self.paused else {}

    def _on_server_info(self, _: Any) -> Any:
        return {"version": self.version, "tp_size": 1, "device": "cpu", "context_length": 4096}

    def _on_model_info(self, _: Any) -> Any:
        return {"model_path": "/models/sim", "weight_version": self.label}

    def _on_tokenize(self, body: Any) -> Any:
        return {"tokens": [int(token) for token in body["prompt"].split()]}

    def _on_weights_checker(self, body: Any) -> Any:
        if "weights" in self.released:
            self.die("a checksum of weights without memory")
        if self.silent_ranks:
            return {"success": True, "ranks": []}
        sums = {name: hashlib.sha256(data).hexdigest()[:32] for name, data in self.weights.items()}
        place = {"rank": 0, "tp_rank": 0}
        place_of_version: Any = [place] if self._sessions else place
        return {"success": True, "ranks": [{"checksums": sums, "parallelism_info": place_of_version}]}

    # weights

    def _on_update_weight_version(self, body: Any) -> Any:
        if not self.stuck_label:
            self._interrupt()
            self.label = body["new_version"]
            self._go_on()
        return DONE

    def _on_begin_weight_update(self, _: Any) -> Any:
        if self.open:
            return (400, {"message": "a weight update is already open"})
        self.open = True
        return DONE

    def _on_end_weight_update(self, _: Any) -> Any:
        if not self.open:
            return (400, {"message": "no weight update is open"})
        self.open = False
        return DONE

    def _on_update_weights_from_tensor(self, body: Any) -> Any:
        if self._sessions and not self.open:
            return (400, {"message": "no weight update is open"})
        self._take(pickle.loads(base64.b64decode(body["serialized_named_tensors"][0])))
        return DONE

    def _on_update_weights_from_disk(self, body: Any) -> Any:
        weights = self._disk.get(body["model_path"])
        if weights is None:
            return (400, {"message": "Failed to get weights iterator"})
        self._take(weights)
        return DONE

    def _on_destroy_weights_update_group(self, body: Any) -> Any:
        self.group = None
        return DONE

    def take_broadcast(self, tensors: Mapping[str, bytes]) -> None:
        """The tensors of ``/update_weights_from_distributed``."""
        self._take(tensors)

    def _take(self, tensors: Mapping[str, bytes]) -> None:
        if "weights" in self.released:
            return self.die("new weights where there is no memory for them")
        if self.skip_update:
            return
        self._interrupt()
        new = dict(self.weights)
        for name, data in tensors.items():
            spoil, self.spoil = self.spoil, None
            if spoil == "lost":
                continue
            if spoil == "swap":
                # With the tensor before it in the order of the names, whose bytes it takes.
                names = sorted(new)
                other = names[names.index(name) - 1]
                new[name], new[other] = new[other], data
                continue
            if spoil == "round":
                data = bytes(byte & 0xF0 if i % 4 == 0 else byte for i, byte in enumerate(data))
            new[name] = bytes([data[0] ^ 1]) + data[1:] if spoil == "bit" else data
        self.weights = new
        self.past.append(new)
        self._go_on()

    def _on_flush_cache(self, _: Any) -> Any:
        return {}

    # memory

    def _on_release_memory_occupation(self, body: Any) -> Any:
        if self.running or self.waiting or self.released & set(body["tags"]):
            self.die(f"{body['tags']} are to be released: {len(self.running)} requests run, {self.released} are away")
            return DONE
        self.released |= set(body["tags"])
        if "weights" in self.released:
            self.weights = {name: bytes(len(data)) for name, data in self.weights.items()}
        return None

    def _on_resume_memory_occupation(self, body: Any) -> Any:
        if not self.released >= set(body["tags"]):
            self.die(f"{body['tags']} are to be resumed, {self.released} are away")
        self.released -= set(body["tags"])
        return None

    # requests

    def _on_pause_generation(self, body: Any) -> Any:
        self._interrupt()
        self.paused = True
        if body["mode"] == "abort":
            self.abort_all()
        return DONE

    def _on_continue_generation(self, _: Any) -> Any:
        self.paused = False
        self._go_on()
        waiting, self.waiting = self.waiting, []
        for request in waiting:
            self._begin(request)
        return DONE

    def _on_abort_request(self, body: Any) -> Any:
        if body.get("abort_all"):
            self.abort_all()
        else:
            for request in [r for r in self.running.values() if r.rid.startswith(body["rid"])]:
                self._interrupt()
                self._finish(request, "abort")
                self._go_on()
        return {}

    def abort_all(self) -> None:
        """Every request returns what it has."""
        self._interrupt()
        for request in list(self.running.values()):
            self._finish(request, "abort")

    def _on_generate(self, body: Any, reply: Reply) -> None:
        request = Running(body["rid"], body, reply)
        if body["rid"] in self.running:
            return reply(400, {"error": {"message": f"Duplicate request ID {body['rid']}"}})
        if self.paused:
            self.waiting.append(request)
        else:
            self._begin(request)

    def _begin(self, request: Running) -> None:
        if self.released:
            return self.die(f"a request without the memory of {self.released}")
        self.running[request.rid] = request
        self._plan(request)

    def _plan(self, request: Running) -> None:
        params = request.params
        prefix = [*request.prompt, *request.done]
        stop = (model.END, *params["stop_token_ids"])
        left = params["max_new_tokens"] - len(request.done)
        seed = params["sampling_seed"]
        request.ahead = model.sample(prefix, self.digest, seed, left, stop)
        request.started = self._loop.time()
        seconds = len(request.ahead) * self._seconds * self.slow
        request.timer = self._loop.call_later(seconds, self._complete, request)

    def _settle(self, request: Running) -> None:
        """Return the part of the plan that has happened by now."""
        if request.timer is not None:
            request.timer.cancel()
            request.timer = None
        passed = self._loop.time() - request.started
        count = min(len(request.ahead), int(passed / (self._seconds * self.slow)))
        self._keep(request, count)

    def _keep(self, request: Running, count: int) -> None:
        if count:
            start = len(request.done)
            request.done += request.ahead[:count]
            request.spans.append((self.label, self.digest, start, len(request.done)))
        request.ahead = []

    def _interrupt(self) -> None:
        for request in self.running.values():
            self._settle(request)

    def _go_on(self) -> None:
        if not self.paused:
            for request in self.running.values():
                self._plan(request)

    def _complete(self, request: Running) -> None:
        request.timer = None
        self._keep(request, len(request.ahead))
        last = request.done[-1]
        self._finish(request, "stop" if last in (model.END, *request.params["stop_token_ids"]) else "length")

    def _finish(self, request: Running, reason: str) -> None:
        del self.running[request.rid]
        columns = columns_of(request, reason, self.label)
        if self.lie is not None:
            junk = self.lie(columns, self)
            if junk is not None:
                return request.reply(200, junk)
        else:
            self.finished.append(columns)
        request.reply(200, encode(columns, request.body, flat=self.version >= "0.5.22"))

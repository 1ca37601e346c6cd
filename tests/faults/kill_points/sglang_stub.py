"""An SGLang server in a process of its own, with a real model in it: its answers are a function of weights and seed.

It outlives the trainers that are killed, with whatever state they left it in: paused, an update open, half of the
weights, an old version.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.faults.kill_points import launcher


class Refused(Exception):
    """Body of an answer with status 400."""


class Server:
    """State and calls. ``folder`` is the model's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.version, self.is_open = "default", False
        self.weights: dict[str, Any] = {}
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.lock = threading.Lock()
        self.engine: Any = None
        self.is_loaded = False

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        """The answer to one call, as SGLang 0.5.23 gives it."""
        if path == "/generate":
            self.goes_on.wait()
        with self.lock:
            call: Callable[[dict[str, Any]], Any] | None = getattr(self, "on" + path.replace("/", "_"), None)
            if call is None:
                raise Refused(f"no such call: {path}")
            return call(body)

    def on_health(self, body: dict[str, Any]) -> Any:
        return {}

    def on_server_info(self, body: dict[str, Any]) -> Any:
        return {"version": "0.5.23", "tp_size": 1, "context_length": 256, "device": "cpu"}

    def on_model_info(self, body: dict[str, Any]) -> Any:
        return {"model_path": str(self.folder), "weight_version": self.version}

    def on_pause_generation(self, body: dict[str, Any]) -> Any:
        self.goes_on.clear()
        return {"status": "ok"}

    def on_continue_generation(self, body: dict[str, Any]) -> Any:
        self.goes_on.set()
        return {"status": "ok"}

    def on_abort_request(self, body: dict[str, Any]) -> Any:
        return {}

    def on_flush_cache(self, body: dict[str, Any]) -> Any:
        return {}

    def on_update_weight_version(self, body: dict[str, Any]) -> Any:
        self.version = body["new_version"]
        return {"success": True}

    def on_begin_weight_update(self, body: dict[str, Any]) -> Any:
        if self.is_open:
            raise Refused("a weight update is already open")
        self.is_open = True
        return {"success": True}

    def on_end_weight_update(self, body: dict[str, Any]) -> Any:
        self.is_open = False
        return {"success": True}

    def on_update_weights_from_tensor(self, body: dict[str, Any]) -> Any:
        if not self.is_open:
            raise Refused("no weight update is open")
        assert body["load_format"] == "flattened_bucket"
        for payload in body["serialized_named_tensors"]:
            bucket = pickle.loads(base64.b64decode(payload))
            data = bucket["flattened_tensor"]
            self._take(
                (each.name, data[each.start_idx : each.end_idx].view(each.dtype).view(each.shape))
                for each in bucket["metadata"]
            )
        return {"success": True}

    def on_update_weights_from_disk(self, body: dict[str, Any]) -> Any:
        from safetensors.torch import load_file

        for file in sorted(Path(body["model_path"]).glob("*.safetensors")):
            self._take(load_file(file).items())
        return {"success": True}

    def on_weights_checker(self, body: dict[str, Any]) -> Any:
        held = fused(self._weights())
        sums = {name: hashlib.sha256(w.contiguous().numpy().tobytes()).hexdigest() for name, w in held.items()}
        place = {"rank": 0, "tp_rank": 0}
        return {"success": True, "ranks": [{"parallelism_info": [place], "checksums": sums}]}

    def on_generate(self, body: dict[str, Any]) -> Any:
        from megatron_dppo.types import Prompt, SamplingParams

        wanted = body["sampling_params"]
        k = body["top_logprobs_num"]
        params = SamplingParams(
            max_new_tokens=wanted["max_new_tokens"],
            temperature=wanted["temperature"],
            seed=wanted["sampling_seed"],
            topk_logprobs=k,
        )
        prompt = Prompt(prompt_id="", text="", token_ids=tuple(body["input_ids"]), label="")
        (completion,) = self._model().generate([prompt], params)
        tokens, logprobs = completion.token_ids.tolist(), completion.logprobs.tolist()
        meta = {
            "id": body["rid"],
            "finish_reason": {"type": completion.finish_reason},
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(tokens),
            "weight_version": self.version,
            "weight_versions": [{"version": self.version, "start": 0, "end": len(tokens)}],
            "output_token_logprobs": [[value, token, None] for value, token in zip(logprobs, tokens, strict=True)],
        }
        if k:
            rows = zip(completion.topk_logprobs.tolist(), completion.topk_token_ids.tolist(), strict=True)
            meta["output_top_logprobs"] = [
                [[value, token, None] for value, token in zip(values[:k], ids[:k], strict=True)] for values, ids in rows
            ]
        if completion.finish_reason == "stop":
            meta["finish_reason"] = {"type": "stop", "matched": tokens[-1]}
        elif completion.finish_reason == "length":
            meta["finish_reason"] = {"type": "length", "length": len(tokens)}
        return {
            "output_ids": tokens,
            "prompt_token_ids": body["input_ids"],
            "text": completion.text,
            "meta_info": meta,
        }

    def _take(self, tensors: Any) -> None:
        self._weights().update((name, tensor.clone()) for name, tensor in tensors)
        self.is_loaded = False

    def _weights(self) -> dict[str, Any]:
        """Weights of the server; at its start, random ones."""
        if not self.weights:
            import torch

            from megatron_dppo.hf.folder import build_hf_model, read_hf_config, stream_model

            model = build_hf_model(read_hf_config(self.folder), torch.float32, seed=1)
            self.weights = {name: weight.detach().clone() for name, weight in stream_model(model)}
            self.weights["lm_head.weight"] = self.weights["model.embed_tokens.weight"].clone()
        return self.weights

    def _model(self) -> Any:
        import torch

        from megatron_dppo.engines.local.engine import LocalEngine
        from megatron_dppo.hf.folder import read_hf_config

        if self.engine is None:
            from transformers import AutoTokenizer

            torch.set_num_threads(1)
            tokenizer = AutoTokenizer.from_pretrained(self.folder)
            config = read_hf_config(self.folder)
            self.engine = LocalEngine(config, tokenizer, dtype=torch.float32, device=torch.device("cpu"))
        if not self.is_loaded:
            own = {name: weight for name, weight in self._weights().items() if name != "lm_head.weight"}
            self.engine.update_weights(own.items(), 0)
            self.is_loaded = True
        return self.engine


def fused(weights: dict[str, Any]) -> dict[str, Any]:
    """As SGLang keeps them on one rank: q, k and v together, all experts of a layer, a padded vocabulary."""
    import torch

    held: dict[str, Any] = {}
    experts: dict[str, dict[tuple[str, int], Any]] = {}
    for name, weight in weights.items():
        if ".self_attn.q_proj." in name:
            parts = [weights[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            held[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        elif ".experts." in name:
            layer, _, rest = name.partition(".experts.")
            index, part, _ = rest.split(".")
            experts.setdefault(f"{layer}.experts", {})[part, int(index)] = weight
        elif name in ("model.embed_tokens.weight", "lm_head.weight"):
            held[name] = torch.nn.functional.pad(weight, (0, 0, 0, -len(weight) % 64))
        elif ".self_attn.k_proj." not in name and ".self_attn.v_proj." not in name:
            held[name] = weight
    for layer, of_layer in experts.items():
        count = 1 + max(index for _, index in of_layer)
        gate_up = [torch.cat([of_layer["gate_proj", i], of_layer["up_proj", i]]) for i in range(count)]
        held[f"{layer}.w13_weight"] = torch.stack(gate_up)
        held[f"{layer}.w2_weight"] = torch.stack([of_layer["down_proj", i] for i in range(count)])
    return held


def handler(server: Server) -> type[BaseHTTPRequestHandler]:
    """HTTP interface of a server."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._reply({})

        def do_POST(self) -> None:
            self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _reply(self, body: dict[str, Any]) -> None:
            try:
                status, answer = 200, server.answer(self.path, body)
            except Refused as error:
                status, answer = 400, {"success": False, "message": str(error)}
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    return Handler


@contextlib.contextmanager
def stub_server(folder: Path) -> Iterator[int]:
    """A server of ``folder / "model"``, as long as the block runs; gives its port."""
    http = ThreadingHTTPServer(("127.0.0.1", 0), handler(Server(folder / "model")), bind_and_activate=True)
    http.daemon_threads = True

    def serve() -> int:
        launcher.die_with_parent()
        with contextlib.suppress(ConnectionError):
            http.serve_forever(poll_interval=0.05)
        return 0

    pid = launcher.fork(serve)
    http.socket.close()
    launcher.KEPT.add(pid)
    try:
        yield http.server_address[1]
    finally:
        launcher.kill(pid)
        os.waitpid(pid, 0)
        launcher.KEPT.discard(pid)

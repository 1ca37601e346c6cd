"""Writes the answers of real vLLM servers that the unit tests use: ``python -m tests.engines.record_vllm``."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

from megatron_dppo.errors import ServerError
from megatron_dppo_engines.servers.http import HttpClient
from megatron_dppo_engines.vllm import wire
from tests.engines.calls import SHORT, ask
from tests.engines.servers import Engine, start_vllm, stop_engine, wait_ready
from tests.engines.tiny import make_tiny

TARGET = Path(__file__).parents[2] / "packages/engines/tests/data/vllm"
_CONFIG = {
    "model_config": ("model", "max_model_len", "max_logprobs", "logprobs_mode"),
    "parallel_config": ("worker_extension_cls", "world_size", "data_parallel_size"),
    "weight_transfer_config": ("backend",),
}


class Recorder:
    """One server; errors are recorded like answers."""

    def __init__(self, engine: Engine) -> None:
        self._http = HttpClient(engine.url, keep_alive=False)

    async def get(self, path: str) -> Any:
        """The answer to a GET."""
        return await self._caught(self._http.get(path, timeout=60))

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """The answer to a POST."""
        return await self._caught(self._http.post(path, body, timeout=60))

    async def _caught(self, call: Any) -> Any:
        try:
            return await call
        except ServerError as error:
            return {"status": error.status, "detail": error.detail}

    async def generate(self, tokens: int, name: str, seconds: float | None = None) -> Any:
        """A request with its answer, aborted after some seconds."""
        body = wire.generate_body(ask(SHORT, tokens, topk=3, temperature=0.7, name=name))
        running = asyncio.create_task(self.post("/inference/v1/generate", body))
        if seconds is not None:
            await asyncio.sleep(seconds)
            await self.post("/abort_requests", {"request_ids": [wire.wire_id(body["request_id"])]})
        return {"prompt": list(SHORT), "tokens": tokens, "answer": await running}

    async def server(self) -> dict[str, Any]:
        """Return what the server reports about itself."""
        info = await self.get("/server_info?config_format=json")
        config = {part: {key: info["vllm_config"][part][key] for key in keys} for part, keys in _CONFIG.items()}
        paths = ("version", "weight_info", "get_world_size")
        return {"server_info": {"vllm_config": config}, **{path: await self.get(f"/{path}") for path in paths}}

    async def close(self) -> None:
        """Free connections."""
        await self._http.close()


async def record_right(engine: Engine) -> dict[str, Any]:
    """A server as it should be started."""
    recorder = Recorder(engine)
    result = {
        **await recorder.server(),
        "generate": await recorder.generate(6, "whole"),
        "aborted": await recorder.generate(1500, "aborted", seconds=0.05),
        "tokenize": await recorder.post("/tokenize", {"prompt": "a b", "add_special_tokens": False}),
        "bad_folder": await recorder.post(
            "/collective_rpc", {"method": "megatron_dppo_load", "kwargs": {"folder": "/nowhere"}}
        ),
    }
    await recorder.close()
    return result


async def record_plain(engine: Engine) -> dict[str, Any]:
    """Without extension and scale-out calls; few log-probabilities."""
    recorder = Recorder(engine)
    result = {**await recorder.server(), "no_scale_out": (await recorder.generate(6, "whole"))["answer"]}
    await recorder.close()
    return result


async def record_closed(engine: Engine) -> dict[str, Any]:
    """Without its control calls."""
    recorder = Recorder(engine)
    body = wire.generate_body(ask(SHORT, 6, topk=30))
    result = {
        "no_control": await recorder.post("/pause?mode=keep", {}),
        "few_logprobs": await recorder.post("/inference/v1/generate", body),
    }
    await recorder.close()
    return result


def main() -> None:
    """Record a right server and two wrong ones."""
    TARGET.mkdir(parents=True, exist_ok=True)
    stock = ("--worker-extension-cls", "", "--weight-transfer-config", '{"backend": "nccl"}')
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny(Path(folder) / "model", seed=0)
        for name, record, options, dev in (
            ("right", record_right, (), "1"),
            ("plain", record_plain, (*stock, "--no-enable-scale-out"), "1"),
            ("closed", record_closed, ("--max-logprobs", "20"), "0"),
        ):
            engine = start_vllm(model, Path(folder) / "log", *options, env={"VLLM_SERVER_DEV_MODE": dev})
            try:
                answers = asyncio.run(record(wait_ready(engine)))
            finally:
                stop_engine(engine)
            text = json.dumps(answers, indent=1).replace(folder, "/folder")
            (TARGET / f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()

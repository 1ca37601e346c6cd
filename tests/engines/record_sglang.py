"""Writes the answers of real SGLang servers that the unit tests use: ``python -m tests.engines.record_sglang``."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

from megatron_dppo.errors import ServerError
from megatron_dppo_engines.servers.http import HttpClient
from megatron_dppo_engines.sglang import wire
from tests.engines.calls import SHORT, ask
from tests.engines.servers import Engine, start_sglang, stop_engine, wait_ready
from tests.engines.tiny import ROUTING, make_tiny

TARGET = Path(__file__).parents[2] / "packages/engines/tests/data/sglang"
_INFO = ("version", "tp_size", "dp_size", "pp_size", "context_length", "max_req_input_len")
_MODEL = ("model_path", "weight_version")


async def record(engine: Engine, *, flat: bool) -> dict[str, Any]:
    """The answers of one server, with the requests that they belong to."""
    http = HttpClient(engine.url)

    async def post(path: str, body: dict[str, Any]) -> Any:
        try:
            return await http.post(path, body, timeout=60)
        except ServerError as error:
            return {"status": error.status, "detail": error.detail}

    async def generate(tokens: int, name: str, seconds: float | None = None) -> Any:
        request = ask(SHORT, tokens, topk=3, routing=ROUTING, temperature=0.7, name=name)
        body = wire.generate_body(request, flat=flat)
        running = asyncio.create_task(post("/generate", body))
        if seconds is not None:
            await asyncio.sleep(seconds)
            await post("/abort_request", {"rid": body["rid"]})
        return {"prompt": list(SHORT), "tokens": tokens, "answer": await running}

    result = {
        "generate": await generate(6, "whole"),
        "aborted": await generate(1500, "aborted", seconds=0.1),
        "server_info": {k: v for k, v in (await http.get("/server_info", timeout=60)).items() if k in _INFO},
        "model_info": {k: v for k, v in (await http.get("/model_info", timeout=60)).items() if k in _MODEL},
        "bad_folder": await post("/update_weights_from_disk", {"model_path": "/nowhere", "load_format": "auto"}),
        "too_long": await post("/generate", {"input_ids": [5] * 3000, "sampling_params": {}}),
        "tokenize": await post("/tokenize", {"prompt": "a b", "add_special_tokens": False}),
        "checksum": await post("/weights_checker", {"action": "checksum"}),
    }
    queued = asyncio.create_task(generate(1500, "queued"))
    await asyncio.sleep(0.1)
    await post("/pause_generation", {"mode": "retract"})
    await post("/abort_request", {"abort_all": True})
    await post("/continue_generation", {})
    result["aborted_in_queue"] = await queued
    await http.close()
    return result


def main() -> None:
    """Record both generations of the protocol."""
    TARGET.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny(Path(folder) / "model", seed=0)
        for version, flat in (("0.5.23", True), ("0.5.20", False)):
            engine = start_sglang(model, Path(folder) / "log", "--enable-return-routed-experts", version=version)
            try:
                answers = asyncio.run(record(wait_ready(engine), flat=flat))
            finally:
                stop_engine(engine)
            text = json.dumps(answers, indent=1).replace(folder, "/folder")
            (TARGET / f"{version}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()

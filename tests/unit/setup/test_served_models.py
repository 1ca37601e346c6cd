"""Models behind URLs: what servers say of them is recorded, and another one is refused at a resume."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from megatron_dppo.config.schema import Config
from megatron_dppo.errors import CheckpointError
from megatron_dppo.setup.changes import check_changes, find_served_changes
from megatron_dppo.setup.served_models import ReadServedModels, read_served_models
from tests.unit.configs import config

VLLM = {"/v1/models": {"data": [{"id": "judge", "root": "org/judge", "created": 1}]}, "/version": {"version": "0.32.0"}}
TEI = {"/info": {"model_id": "org/embedder", "model_sha": "abc123", "version": "1.7"}}
HOSTED = {"/v1/models": {"data": [{"id": "small"}, {"id": "large"}]}}


def sglang(digest: str, path: str = "/models/teacher", version: str = "default") -> dict[str, Any]:
    """Return responses of an SGLang server."""
    rank = {"parallelism_info": [{"rank": 0, "tp_rank": 0}], "checksums": {"lm_head.weight": digest}}
    return {
        "/v1/models": {"data": [{"id": path, "root": path}]},
        "/model_info": {"model_path": path, "weight_version": version},
        "/server_info": {"version": "0.5.23", "revision": "r1", "model_path": path},
        "/weights_checker": {"success": True, "ranks": [rank]},
    }


@contextmanager
def served(responses: dict[str, Any]) -> Iterator[str]:
    """Serve JSON by path; the dictionary may be changed meanwhile. The key is ``secret``."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            is_known = self.path in responses and self.headers["Authorization"] in (None, "Bearer secret")
            body = json.dumps(responses.get(self.path)).encode()
            self.send_response(200 if is_known else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def judged(url: str | list[str], model: str = "judge", **options: Any) -> Config:
    options |= {"url": url, "model": model, "prompt": "{completion}", "choices": {"yes": 1.0}}
    return config(reward={"function": "judge", "options": options})


def read_models(settings: Config) -> ReadServedModels:
    return read_served_models(settings.distillation, settings.reward)


def test_every_kind_of_server_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    with served(VLLM) as vllm, served(TEI) as tei, served(HOSTED) as hosted, served(sglang("d1")) as teacher:
        reward = {"endpoint": "openai_embeddings", "url": tei, "index": 0}
        options = judged(vllm, api_key_env="JUDGE_KEY").reward.options
        functions = {
            "a": {"function": "judge", "options": options},
            "b": {"function": "reward_model", "options": reward},
            "c": {"function": "judge", "options": {**options, "url": hosted, "model": "large"}},
            "d": {"function": "math"},
        }
        everything = config(
            reward={"function": "", "functions": functions},
            distillation={"coef": 0.1, "divergence": "sampled", "teacher_urls": [teacher], "teacher_engine": "sglang"},
        )
        read = read_models(everything)
    weights = read.models["distillation.teacher_urls"].pop("weights (SGLang 0.5.23, 1 rank)")  # type: ignore[attr-defined]
    assert len(weights[0]) == 64
    assert read.models == {
        "distillation.teacher_urls": {
            "name": ["/models/teacher"],
            "path": ["/models/teacher"],
            "revision": ["r1"],
            "version": ["default"],
        },
        "reward.functions.a.options.url": {"name": ["judge"], "path": ["org/judge"]},
        "reward.functions.b.options.url": {"name": ["org/embedder"], "revision": ["abc123"]},
        "reward.functions.c.options.url": {"name": ["large"]},
    }
    noted = [note.split()[1].rstrip(":") for note in read.notes]
    assert noted == [
        "reward.functions.a.options.url",
        "reward.functions.b.options.url",
        "reward.functions.c.options.url",
    ]
    assert "only its name, revision, as the server has no digest" in read.notes[1]


def test_another_model_behind_the_same_url_is_refused_and_can_be_accepted(tmp_path: Any) -> None:
    responses = sglang("d1")
    with served(responses) as url:
        settings = judged(url, "")
        before = read_models(settings).models
        assert not find_served_changes(before, read_models(settings).models)
        # With equal weights their place does not matter.
        responses.update(sglang("d1", path="/elsewhere", version="7"))
        assert not find_served_changes(before, read_models(settings).models)
        responses.update(sglang("d2"))
        (change,) = find_served_changes(before, read_models(settings).models)
        refused = r"reward\.options\.url: the served model's weights \(SGLang 0\.5\.23, 1 rank\): \w{12} -> \w{12}\n"
        with pytest.raises(CheckpointError, match=refused + r"(.|\n)*--allow-changed reward\.options\.url"):
            check_changes([change], tmp_path, accepted=False)
        check_changes([change], tmp_path, accepted=["reward.options.url"])
        # Another number of ranks gives another digest of the same weights; the rest is compared.
        two = [{"parallelism_info": [{"rank": i, "tp_rank": i}], "checksums": {"a": "b"}} for i in range(2)]
        responses["/weights_checker"] = {"success": True, "ranks": two}
        assert not find_served_changes(before, read_models(settings).models)
        # So it is without digests at one of the starts.
        responses["/weights_checker"] = {"success": False}
        assert not find_served_changes(before, read_models(settings).models)
        responses["/server_info"]["revision"] = "r2"
        (change,) = find_served_changes(before, read_models(settings).models)
        assert str(change) == "reward.options.url: the served model's revision: r1 -> r2"


def test_addresses_and_unreachable_servers_are_no_changes() -> None:
    with served(VLLM) as first, served(json.loads(json.dumps(VLLM))) as second:
        before = read_models(judged([first, second])).models
        assert before == {"reward.options.url": {"name": ["judge"], "path": ["org/judge"]}}
        assert read_models(judged(second)).models == before
    now = read_models(judged([first, second]))
    assert now.models == {} and not find_served_changes(before, now.models)
    assert "a resume compares nothing" in now.notes[0]
    assert read_models(config()) == ({}, ())


@pytest.mark.parametrize(
    "value", [None, [], 5, "text", {"data": 5}, {"data": [5, None]}, {"data": [{"id": 7, "root": []}]}]
)
def test_nonsense_is_no_description(value: Any) -> None:
    paths = ("/v1/models", "/model_info", "/server_info", "/info", "/weights_checker", "/version")
    with served(dict.fromkeys(paths, value)) as url:
        assert read_models(judged(url)).models == {}

"""The server of the Tinker API: losses, gradients and samples equal transformers with PEFT in float64.

The first tests speak HTTP themselves. Those with the real client need MEGATRON_DPPO_TINKER_PYTHON, the Python of an
environment with ``tinker`` 0.38 (and ``tinker-cookbook`` 0.6.1 for the recipes).
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import Qwen3ForCausalLM

from megatron_dppo.mcore.lora_layer import kaiming_uniform
from test_tinker_wire import add_tensor, message
from tests.e2e.tinker_server import ALPHA, END, KEY, RANK, Served, client_python, run_client, serve, write_model

pytestmark = pytest.mark.e2e
SEED = 3
VOCAB = 320
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAM = {"learning_rate": 0.02, "beta1": 0.8, "beta2": 0.9, "eps": 1e-2, "weight_decay": 0.1, "grad_clip_norm": 0.0}
LOSSES = [
    ("cross_entropy", {}),
    ("importance_sampling", {}),
    ("ppo", {"clip_high_threshold": 1.1}),
    ("dppo_binary_tv", {"divergence_threshold_low": 0.002, "divergence_threshold_high": 0.002}),
]
PROMPT = [7, 50, 60, 70]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tinker") / "model")


class Reference:
    """Transformers with PEFT in float64, plain losses, and torch's AdamW."""

    def __init__(self, folder: Path, rank: int = RANK) -> None:
        base = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float64)
        self.model = get_peft_model(base, LoraConfig(r=rank, lora_alpha=ALPHA, target_modules=TARGETS))
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_("lora_" in name)
            if "lora_A" in name:
                module = name.removeprefix("base_model.model.").removesuffix(".lora_A.default.weight")
                parameter.data = kaiming_uniform(rank, parameter.shape[1], f"{SEED} {module}").double()
            if "lora_B" in name:
                parameter.data = torch.zeros_like(parameter.data, dtype=torch.float64)
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1.0)

    def logprobs(self, tokens: list[int], targets: list[int]) -> Tensor:
        scores = self.model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
        return scores.gather(1, torch.tensor(targets)[:, None])[:, 0]

    def step(self, step: dict[str, Any]) -> dict[str, Any]:
        """One update. The loss and the norm of its gradient."""
        self.optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        rows = []
        for each in step["data"]:
            row = self.logprobs(each["tokens"], each["inputs"]["target_tokens"])
            rows.append(row.tolist())
            total = total + loss_of(step["loss_fn"], step["config"], row, each["inputs"])
        total.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.trained if p.grad is not None])
        adam = step["adam"]
        if adam["grad_clip_norm"]:
            torch.nn.utils.clip_grad_norm_(self.trained, adam["grad_clip_norm"])
        group = self.optimizer.param_groups[0]
        group |= {"lr": adam["learning_rate"], "betas": (adam["beta1"], adam["beta2"])}
        group |= {"eps": adam["eps"], "weight_decay": adam["weight_decay"]}
        self.optimizer.step()
        return {"logprobs": rows, "loss": float(total), "grad_norm": float(norm)}


def loss_of(name: str, config: dict[str, float], row: Tensor, inputs: dict[str, list[float]]) -> Tensor:
    """The loss of one sequence, token by token."""
    total = torch.zeros((), dtype=torch.float64)
    for t, logprob in enumerate(row):
        if name == "cross_entropy":
            total = total - inputs["weights"][t] * logprob
            continue
        advantage, mu = inputs["advantages"][t], inputs["logprobs"][t]
        ratio = (logprob - mu).exp()
        if name == "importance_sampling":
            total = total - advantage * ratio
        elif name == "ppo":
            total = total - torch.minimum(
                advantage * ratio, advantage * ratio.clamp(0.8, config["clip_high_threshold"])
            )
        else:
            moved = float(logprob.exp()) - float(np.exp(mu))
            if advantage * moved > 0 and abs(moved) > config["divergence_threshold_high"]:
                continue
            total = total - advantage * min(float(ratio), 5.0) * logprob
    return total


def scenario(model: Path) -> dict[str, Any]:
    """Steps with every loss. Anchors are the base model's log-probabilities with noise, 0 on the prompt."""
    reference = Reference(model)
    rng = np.random.default_rng(0)
    steps = []
    for number, (name, config) in enumerate(LOSSES):
        data = []
        for length in (5, 17, 9, 30):
            ids = rng.integers(3, VOCAB, length + 1).tolist()
            inputs: dict[str, list[float]] = {"target_tokens": ids[1:]}
            first = length // 3
            if name == "cross_entropy":
                inputs["weights"] = [0.0] * first + rng.normal(1, 0.5, length - first).astype(np.float32).tolist()
            else:
                with torch.no_grad():
                    mu = reference.logprobs(ids[:-1], ids[1:]).numpy() + rng.normal(0, 0.4, length)
                mu = np.minimum(mu, -1e-3).astype(np.float32)
                mu[:first] = 0
                inputs["logprobs"] = mu.tolist()
                inputs["advantages"] = [0.0] * first + rng.normal(size=length - first).astype(np.float32).tolist()
            data.append({"tokens": ids[:-1], "inputs": inputs})
        adam = ADAM | {"grad_clip_norm": 0.5 * (number % 2)}
        steps.append({"loss_fn": name, "config": config, "data": data, "adam": adam})
    sampling = {
        "greedy": {"max_tokens": 6, "temperature": 0.0},
        "drawn": {"max_tokens": 6, "seed": 11},
        "drawn_again": {"max_tokens": 6, "seed": 11},
    }
    return {
        "lora": {"rank": RANK, "seed": SEED},
        "steps": steps,
        "prompt": PROMPT,
        "sampling": sampling,
        "refused": ["gspo", "nonsense"],
    }


def assert_close(actual: list[list[float]], expected: list[list[float]], tolerance: float = 2e-4) -> None:
    assert len(actual) == len(expected)
    for row, correct in zip(actual, expected, strict=True):
        np.testing.assert_allclose(row, correct, atol=tolerance, rtol=0)


def check_steps(model: Path, played: dict[str, Any], result: dict[str, Any]) -> Reference:
    """Compare what a client got with the reference, and return the reference after the last step."""
    reference = Reference(model)
    masked = 0
    for step, actual in zip(played["steps"], result["steps"], strict=True):
        correct = reference.step(step)
        assert_close(actual["logprobs"], correct["logprobs"])
        assert actual["loss"] == pytest.approx(correct["loss"], abs=2e-3)
        assert actual["grad_norm"] == pytest.approx(correct["grad_norm"], rel=2e-3)
        masked += correct["grad_norm"] > 0
    assert masked == len(LOSSES)
    with torch.no_grad():
        rows = [
            reference.logprobs(each["tokens"], each["inputs"]["target_tokens"]).tolist()
            for each in played["steps"][0]["data"]
        ]
    assert_close(result["forward"], rows)
    changes = np.concatenate([np.subtract(*pair) for pair in zip(rows, result["steps"][0]["logprobs"], strict=True)])
    assert np.abs(changes).max() > 0.05, "the updates must change what is compared"
    return reference


class RawClient:
    """The API in a few lines: urllib, and Google's library for messages."""

    def __init__(self, url: str, key: str = KEY) -> None:
        self.url = url
        self.key = key

    def send(self, path: str, body: Any = None, *, key: str | None = None, kind: str = "application/json") -> Any:
        """Return the parsed answer, and the bytes of a message."""
        content = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        headers = {"X-API-Key": self.key if key is None else key, "Content-Type": kind}
        request = urllib.request.Request(f"{self.url}/api/v1/{path}", content, headers)
        with urllib.request.urlopen(request, timeout=120) as response:
            answer = response.read()
            return answer if response.headers["Content-Type"] == "application/x-protobuf" else json.loads(answer)

    def refused(self, path: str, body: Any = None, **options: Any) -> tuple[int, str]:
        """Return status and sentence of a request that must fail."""
        with pytest.raises(urllib.error.HTTPError) as caught:
            self.send(path, body, **options)
        return caught.value.code, json.loads(caught.value.read())["detail"]

    def result(self, future: dict[str, Any]) -> Any:
        return self.send("retrieve_future", {"request_id": future["request_id"], "allow_metadata_only": True})

    def forward_backward(self, model_id: str, seq_id: int, step: dict[str, Any], *, forward_only: bool = False) -> Any:
        """Submit a step's data; the future."""
        body = message("Request")
        body.model_id, body.seq_id, body.loss_fn, body.forward_only = model_id, seq_id, step["loss_fn"], forward_only
        for name, value in step["config"].items():
            body.loss_fn_config_v2.add(key=name).value.number = value
        for each in step["data"]:
            datum = body.data.add()
            datum.model_input.add().encoded_text.tokens = np.array(each["tokens"], np.int32).tobytes()
            for name, values in each["inputs"].items():
                add_tensor(datum, name, np.array(values, np.int64 if name == "target_tokens" else np.float32))
        return self.send("forward_backward", body.SerializeToString(), kind="application/x-protobuf")

    def outputs(self, future: dict[str, Any]) -> tuple[list[list[float]], dict[str, float]]:
        """Log-probabilities of each datum, and the metrics."""
        output = message("Output")
        output.ParseFromString(self.result(future))
        tensor = output.loss_fn_outputs[0].fields[0].value
        offsets = np.frombuffer(tensor.offsets, np.int64)
        rows = [np.frombuffer(tensor.data[a:b], np.float32).tolist() for a, b in pairwise(offsets)]
        return rows, {entry.key: entry.value for entry in output.metrics}


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(
        model, tmp_path_factory.mktemp("server") / "run", "--base-model", "tiny", "--max-body-mb", "1"
    ) as server:
        yield server


def test_updates_and_samples_equal_the_reference(served: Served, model: Path) -> None:
    client = RawClient(served.url)
    session = client.send("create_session", {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"})["session_id"]
    lora = {"rank": RANK, "seed": SEED, "train_unembed": True, "train_mlp": True, "train_attn": True}
    asked = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": lora}
    created = client.send("create_model", asked)
    assert created == client.send("create_model", asked), "a repeated request gets the same future"
    model_id = client.result(created)["model_id"]
    assert client.send("get_info", {"model_id": model_id})["model_data"]["tokenizer_id"] == str(model.resolve())

    played = scenario(model)
    result: dict[str, Any] = {"steps": []}
    number = iter(range(1, 100))
    for step in played["steps"]:
        parts = []
        for data in (step["data"][:2], step["data"][2:]):
            seq_id = next(number)
            parts.append(client.forward_backward(model_id, seq_id, step | {"data": data}))
            # The client has no answer and repeats itself: the gradient is added once.
            assert client.forward_backward(model_id, seq_id, step | {"data": data}) == parts[-1]
        update = client.send("optim_step", {"model_id": model_id, "seq_id": next(number), "adam_params": step["adam"]})
        outputs = [client.outputs(part) for part in parts]
        result["steps"].append(
            {
                "logprobs": [row for rows, _ in outputs for row in rows],
                "loss": sum(metrics["loss:sum"] for _, metrics in outputs),
                "grad_norm": client.result(update)["metrics"]["grad_norm:mean"],
            }
        )
    forward = client.forward_backward(model_id, next(number), played["steps"][0], forward_only=True)
    result["forward"] = client.outputs(forward)[0]
    reference = check_steps(model, played, result)

    saved = client.send(
        "save_weights_for_sampler", {"model_id": model_id, "seq_id": next(number), "sampling_session_seq_id": 0}
    )
    sampler = client.result(saved)["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]}
    sample = {"sampling_session_id": sampler, "prompt": prompt, "num_samples": 3, "prompt_logprobs": True}
    params = {"max_tokens": 5, "temperature": 1.0, "stop": [9], "top_k": -1, "top_p": 1.0}
    samples = message("Samples")
    samples.ParseFromString(client.result(client.send("asample", sample | {"seq_id": 0, "sampling_params": params})))
    assert len(samples.sequences) == 3
    for each in samples.sequences:
        tokens = np.frombuffer(each.tokens, np.int32).tolist()
        check_sample(reference, tokens, np.frombuffer(each.logprobs, np.float32).tolist())
        assert each.stop_reason == (0 if tokens[-1] in (9, END) else 1)
    with torch.no_grad():
        scored = reference.logprobs(PROMPT[:-1], PROMPT[1:]).tolist()
    assert_close([np.frombuffer(samples.prompt_logprobs, np.float32)[1:].tolist()], [scored])


def check_sample(reference: Reference, tokens: list[int], logprobs: list[float]) -> None:
    ids = [*PROMPT, *tokens]
    with torch.no_grad():
        correct = reference.logprobs(ids[:-1], ids[1:])[len(PROMPT) - 1 :]
    assert_close([logprobs], [correct.tolist()])


def test_what_is_wrong_is_refused_in_words(served: Served) -> None:
    client = RawClient(served.url)
    assert client.refused("create_session", {"tags": []}, key="tml-wrong")[0] == 401
    assert client.refused("healthz", key="")[0] == 401
    assert client.refused("audit") == (404, "POST /api/v1/audit: is not served (packages/tinker/README.md)")
    session_body = {"tags": [], "user_metadata": None, "sdk_version": "0"}
    assert client.refused("create_session", session_body | {"nonsense": 1})[0] == 422
    session = client.send("create_session", session_body)["session_id"]
    lora = {"rank": RANK + 1}
    asked = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": lora}
    assert "above 4" in client.refused("create_model", asked)[1]
    assert client.refused("create_model", asked | {"optimizer_config": {"type": "dimuon"}})[0] == 422
    assert "other" in client.refused("create_model", asked | {"base_model": "other"})[1]
    assert client.refused("create_model", asked | {"session_id": "unknown"})[0] == 404
    for path in (
        "tinker://../weights/x",
        f"tinker://{session}:train:0/weights/../../x",
        "tinker://a/weights/b",
        "/etc",
    ):
        assert "no path of this server" in client.refused("weights_info", {"tinker_path": path})[1]
    assert client.refused("forward_backward", b"\xff" * 100, kind="application/x-protobuf")[0] == 400
    assert client.refused("forward_backward", b"{}")[0] == 415
    assert client.refused("create_session", b" " * (2 << 20))[0] == 413
    assert client.refused("retrieve_future", {"request_id": "unknown"})[0] == 404
    assert client.send("telemetry", {"events": []}) == {"status": "accepted"}
    log = served.log.read_text()
    assert KEY not in log and "Traceback" not in log


@pytest.mark.long
@pytest.mark.skipif(client_python() is None, reason="needs MEGATRON_DPPO_TINKER_PYTHON with tinker 0.38")
def test_the_real_client_gets_the_same(model: Path, tmp_path: Path) -> None:
    played = scenario(model)
    (tmp_path / "scenario.json").write_text(json.dumps(played))
    with serve(model, tmp_path / "run", "--base-model", "tiny") as server:
        script = Path(__file__).with_name("tinker_client.py")
        result = json.loads(run_client(server, script, str(tmp_path / "scenario.json")).splitlines()[-1])
    reference = check_steps(model, played, result)
    greedy = {tuple(tokens) for tokens, _, _ in result["greedy"]}
    assert len(greedy) == 1
    for name in ("greedy", "drawn"):
        for tokens, logprobs, _ in result[name]:
            check_sample(reference, tokens, logprobs)
    assert result["drawn"] == result["drawn_again"]
    assert result["prompt"] == result["saved_prompt"] != result["base_prompt"]
    first, second = result["next"]
    assert first == second and result["after"][0] == result["after"][1], "a restored model continues bit for bit"
    assert "exists" in result["again"]
    assert "not served" in result["refused"]["gspo"] and "unknown" in result["refused"]["nonsense"]
    assert "--max-models" in result["too_many_models"] and "tiny" in result["wrong_model"]
    assert result["custom"]["rows"] == 4


@pytest.mark.long
@pytest.mark.skipif(client_python() is None, reason="needs MEGATRON_DPPO_TINKER_PYTHON with tinker-cookbook 0.6.1")
def test_recipes_of_the_cookbook_train(tmp_path: Path) -> None:
    """Supervised training, then RL with DPPO from its checkpoint, by the cookbook's own loops."""
    model = write_model(tmp_path / "model", hidden=64)
    logs = tmp_path / "logs"
    logs.mkdir()
    with serve(model, tmp_path / "run", "--base-model", str(model), rank=16) as server:
        script = Path(__file__).with_name("tinker_recipes.py")
        result = json.loads(run_client(server, script, str(model), str(logs)).splitlines()[-1])
    nll = [row["train_mean_nll"] for row in result["sft"] if "train_mean_nll" in row]
    assert nll[0] > 5 and nll[-1] < 1.5, nll
    rows = [row for row in result["rl"] if "env/all/format" in row]
    # Engine and trainer agree on the sampled tokens: an estimate of their KL is rounding alone.
    assert max(abs(row["optim/kl_sample_train_v1"]) for row in rows) < 1e-5
    # The reward is for an answer that ends; a random model's sums stay wrong.
    ended = [row["env/all/format"] for row in rows]
    assert len(ended) == 30 and np.mean(ended[-10:]) > np.mean(ended[:5]) + 0.1, ended

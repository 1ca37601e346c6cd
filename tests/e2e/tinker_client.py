"""Plays a scenario with the real client of Tinker, in its own Python: JSON in, JSON out. See ``test_tinker``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import tinker
from tinker import types


def datums(data: list[dict[str, Any]]) -> list[types.Datum]:
    """The data of a step."""
    return [
        types.Datum(model_input=types.ModelInput.from_ints(each["tokens"]), loss_fn_inputs=dict(each["inputs"]))
        for each in data
    ]


def logprobs(output: Any) -> list[list[float]]:
    """Log-probabilities of each datum."""
    return [each["logprobs"].tolist() for each in output.loss_fn_outputs]


def train(client: Any, step: dict[str, Any]) -> dict[str, Any]:
    """One update from the two halves of the data, in two calls."""
    data = datums(step["data"])
    half = len(data) // 2
    parts = [client.forward_backward(part, step["loss_fn"], step["config"]) for part in (data[:half], data[half:])]
    update = client.optim_step(types.AdamParams(**step["adam"]))
    outputs = [part.result() for part in parts]
    return {
        "logprobs": [row for output in outputs for row in logprobs(output)],
        "loss": sum(output.metrics["loss:sum"] for output in outputs),
        "grad_norm": update.result().metrics["grad_norm:mean"],
    }


def refusal(call: Any) -> str:
    """The sentence of an error."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def custom_loss(data: list[Any], rows: list[Any]) -> tuple[Any, dict[str, float]]:
    """A loss that is computed in the client."""
    del data
    return sum((row**2).sum() for row in rows), {"rows": float(len(rows))}


def main() -> None:
    """Play the scenario."""
    scenario = json.loads(Path(sys.argv[1]).read_text())
    service = tinker.ServiceClient()
    lora = scenario["lora"]
    client = service.create_lora_training_client(base_model="tiny", **lora).result()
    result: dict[str, Any] = {"steps": [train(client, step) for step in scenario["steps"]]}
    last = scenario["steps"][-1]
    data = datums(scenario["steps"][0]["data"])
    result["forward"] = logprobs(client.forward(data, "cross_entropy").result())

    # Sampling with the trained weights, greedily and not, and scoring of a prompt.
    sampler = client.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(scenario["prompt"])
    for name, params in scenario["sampling"].items():
        response = sampler.sample(prompt, 4, types.SamplingParams(**params)).result()
        result[name] = [(each.tokens, each.logprobs, each.stop_reason) for each in response.sequences]
    result["prompt"] = sampler.compute_logprobs(prompt).result()
    base = service.create_sampling_client(base_model="tiny").result()
    result["base_prompt"] = base.compute_logprobs(prompt).result()

    # Saved, restored with and without the optimizer, and trained on: bit for bit.
    state = client.save_state("state").result().path
    weights = client.save_weights_for_sampler("weights").result().path
    result["saved_prompt"] = (
        service.create_sampling_client(model_path=weights).result().compute_logprobs(prompt).result()
    )
    result["again"] = refusal(lambda: client.save_state("state").result())
    restored = service.create_training_client_from_state_with_optimizer(state).result()
    result["next"] = [train(each, last) for each in (client, restored)]
    result["after"] = [logprobs(each.forward(data, "cross_entropy").result()) for each in (client, restored)]
    result["custom"] = restored.forward_backward_custom(data, custom_loss).result().metrics
    result["refused"] = {
        name: refusal(lambda name=name: client.forward_backward(data, name).result()) for name in scenario["refused"]
    }
    result["too_many_models"] = refusal(
        lambda: service.create_lora_training_client(base_model="tiny", rank=lora["rank"]).result()
    )
    result["wrong_model"] = refusal(lambda: service.create_lora_training_client(base_model="other", rank=1).result())
    print(json.dumps(result))


if __name__ == "__main__":
    main()

"""The local engine's routes are those of one pass of the model over each whole sequence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from columns import same
from megatron_dppo.data.chat import load_tokenizer
from megatron_dppo.engines.local.engine import LocalEngine
from megatron_dppo.hf.folder import build_hf_model, read_hf_config, routing_shape, stream_model
from megatron_dppo.types import Completion, Prompt, SamplingParams
from megatron_dppo_engines.route_checks import check_routes, is_missing

MODEL = Path(__file__).parents[3] / "examples/chain_sum/model"


def router_logits(model: Any, tokens: list[int], layer: int) -> Tensor:
    """``[tokens, experts]``, from the router's own weights and inputs."""
    inputs_of_gate: list[Tensor] = []
    gate = model.model.layers[layer].mlp.gate
    handle = gate.register_forward_pre_hook(
        lambda _m, inputs: inputs_of_gate.append(inputs[0].reshape(len(tokens), -1))
    )
    with torch.no_grad():
        model(input_ids=torch.tensor([tokens]))
    handle.remove()
    return inputs_of_gate[0] @ gate.weight.T


def one_pass(model: Any, tokens: list[int], layer: int) -> Tensor:
    """``[tokens, k]``: the experts of each token."""
    return router_logits(model, tokens, layer).topk(model.model.layers[layer].mlp.gate.top_k, dim=-1).indices


def generate(config: Any, **params: Any) -> tuple[Any, list[tuple[Prompt, Completion]]]:
    """Answers of many lengths to prompts of several lengths, and the model that gave them."""
    tokenizer = load_tokenizer(MODEL)
    tokenizer.eos_token_id = 3
    model = build_hf_model(config, torch.float32, seed=1)
    with torch.no_grad():
        model.lm_head.weight[3] *= 3  # ends come early, so that rows leave the batch
    engine = LocalEngine(config, tokenizer, dtype=torch.float32, device=torch.device("cpu"), max_batch=20)
    engine.update_weights(stream_model(model), 0)
    texts = ["7+8-3="] * 12 + ["1="] * 8 + ["9-9-9+4="] * 6
    prompts = [Prompt(prompt_id=t, text=t, token_ids=tuple(tokenizer(t).input_ids), label="") for t in texts]
    settings = SamplingParams(max_new_tokens=14, seed=4, **params)
    return model, list(zip(prompts, engine.generate(prompts, settings), strict=True))


@pytest.mark.parametrize("dense_layers", [[], [1]])
def test_experts_of_every_token_in_every_layer_are_reported(dense_layers: list[int]) -> None:
    config = read_hf_config(MODEL)
    config.mlp_only_layers = dense_layers
    model, answers = generate(config, routed_experts=True)
    shape = routing_shape(config)
    assert shape is not None and shape.dense_layers == set(dense_layers)
    assert len({len(c.token_ids) for _, c in answers}) > 4
    for prompt, completion in answers:
        read = [*prompt.token_ids, *completion.token_ids[:-1].tolist()]
        assert completion.routed_experts is not None
        check_routes(completion.routed_experts, shape, tokens=len(read), request=prompt.prompt_id)
        for layer in range(config.num_hidden_layers):
            result = completion.routed_experts[:, layer]
            if layer in dense_layers:
                assert is_missing(result).all()
            else:
                assert torch.equal(result.long(), one_pass(model, read, layer))


def test_recording_changes_no_response_and_is_off_by_default() -> None:
    config = read_hf_config(MODEL)
    _, plain = generate(config)
    _, recorded = generate(config, routed_experts=True)
    assert all(c.routed_experts is None for _, c in plain)
    assert same(plain, [(prompt, replace(c, routed_experts=None)) for prompt, c in recorded])


def test_a_dense_model_has_no_routes() -> None:
    from tests.distributed.parity import hf_config

    config = hf_config(tied=False, dense=True)
    config.eos_token_id = 2
    engine = LocalEngine(config, load_tokenizer(MODEL), dtype=torch.float32, device=torch.device("cpu"))
    engine.update_weights(stream_model(build_hf_model(config, torch.float32)), 0)
    prompt = Prompt(prompt_id="p", text="1=", token_ids=(5, 6), label="")
    with pytest.raises(ValueError, match="has no experts"):
        engine.generate([prompt], SamplingParams(max_new_tokens=2, routed_experts=True))

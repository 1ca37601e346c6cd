"""The configurations that ship."""

from __future__ import annotations

import json
import runpy
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from http_stub import Call, running
from megatron_dppo.config.io import dump_toml, load_config, validate
from megatron_dppo.config.layout import resolve_layout
from megatron_dppo.rewards import RewardItem
from megatron_dppo.setup.engines import open_scorer
from megatron_dppo_agents.template import ChatTemplate
from megatron_dppo_conversations.formats import choose_format
from tests.engines.tiny import SPECIAL, byte_tokenizer
from tests.unit.configs import QWEN3_30B_A3B, server_plans

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = sorted(EXAMPLES.rglob("*.toml"))


@pytest.mark.parametrize("file", FILES, ids=lambda f: f"{f.parent.name}/{f.name}")
def test_every_example_is_valid_and_survives_being_written(file: Path) -> None:
    config = load_config(file)
    assert validate(tomllib.loads(dump_toml(config)), "again") == config


def test_the_examples_are_found() -> None:
    names = {f"{file.parent.name}/{file.name}" for file in FILES}
    assert {"chain_sum/dppo.toml", "chain_sum/sglang.toml", "chain_sum/vllm.toml", "qwen3_30b_a3b/dppo.toml"} <= names


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_the_engine_examples_are_the_embedded_task(engine: str) -> None:
    local, served = load_config(EXAMPLES / "chain_sum/dppo.toml"), load_config(EXAMPLES / f"chain_sum/{engine}.toml")
    if engine == "vllm":  # its CPU attention has no heads of 16
        model = local.model.model_copy(update={"path": str(EXAMPLES / "chain_sum/model_vllm")})
        local = local.model_copy(update={"model": model})
    for section in ("model", "parallel", "data", "reward", "loss", "optimizer", "eval"):
        assert getattr(served, section) == getattr(local, section), section
    assert served.train.needs_engine_routing == (engine == "sglang")


def test_the_30b_example_fits_its_nodes() -> None:
    config = load_config(EXAMPLES / "qwen3_30b_a3b/dppo.toml")
    layout = resolve_layout(config.parallel, config.batch, 32, QWEN3_30B_A3B)
    assert (layout.tp, layout.ep, layout.etp, layout.dp, layout.expert_dp) == (2, 8, 1, 16, 4)
    rollout, train = config.rollout, config.train
    assert rollout.prompts_per_step * rollout.samples_per_prompt == 4096
    assert rollout.prompts_per_step // train.mini_batches == 32
    longest = config.data.max_prompt_tokens + rollout.max_new_tokens
    assert train.micro_batch_tokens >= longest and rollout.sglang["context-length"] >= longest
    plans = server_plans(config, {}, [str(i) for i in range(8)])
    assert [plan.env["CUDA_VISIBLE_DEVICES"] for plan in plans] == ["0,1", "2,3", "4,5", "6,7"]
    assert all("--enable-return-routed-experts" in plan.argv for plan in plans)


@pytest.mark.slow
def test_the_rlhf_example_scores_by_a_reward_model_without_labels(tmp_path: Path) -> None:
    config = load_config(EXAMPLES / "rlhf/dppo.toml")
    assert config.needs_reference and config.reward.kl_coef > 0 and config.data.label_key == ""
    preference = config.reward.functions["preference"]
    tokenizer = byte_tokenizer(SPECIAL)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    options = preference.options | {"tokenizer": str(tmp_path), "index": 0}

    async def classify(call: Call) -> Any:
        return {"data": [{"index": i, "probs": [float(len(ids))]} for i, ids in enumerate(call.body["input"])]}

    with running({"/classify": classify}) as stub:
        functions = config.reward.functions | {
            "preference": preference.model_copy(update={"options": options | {"url": stub.url}})
        }
        reward = config.reward.model_copy(update={"functions": functions})
        scorer = open_scorer(config.model_copy(update={"reward": reward}))
        items = [
            RewardItem(prompt="Q", completion=text, label="", metadata={"finish_reason": reason})
            for text, reason in (("abc", "stop"), ("abcde", "length"))
        ]
        whole, cut = scorer.score(items)
        scorer.close()
    assert (whole.reward, cut.reward) == (4.0, 6.0 - 2.0) and cut.parts["finished"] == 1.0
    assert cut.eval_score == 6.0


def test_the_model_and_supervised_pairs_of_the_verifiers_example_fit_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pairs have the prompts that the agent's calls will have, and calls that the format of the template reads."""
    code = runpy.run_path(str(EXAMPLES / "agents/vf_sums/prepare.py"))
    monkeypatch.setattr(sys, "argv", ["prepare.py", str(tmp_path)])
    code["main"]()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    assert config["vocab_size"] == len(tokenizer) and config["eos_token_id"] == tokenizer.eos_token_id
    pairs = [json.loads(line) for line in (tmp_path / "warmup.jsonl").read_text().splitlines()]
    form = choose_format(tokenizer.chat_template)
    assert form.name == "hermes" and len(pairs) == 6000
    template = ChatTemplate(tokenizer, {})
    tool = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
    calls = 0
    for pair in pairs[:400]:
        ids = tokenizer(pair["prompt"] + pair["response"]).input_ids
        assert tokenizer.decode(ids) == pair["prompt"] + pair["response"]
        assert "?" not in tokenizer.convert_ids_to_tokens(ids)
        question = pair["prompt"].split("user\n")[1].split("<|im_end|>")[0]
        opening = template.opening([{"role": "user", "content": question}], [tool])
        assert pair["prompt"].startswith(tokenizer.decode(opening))
        parsed = form.parse(pair["response"], [tool])
        if parsed.tool_calls:
            calls += 1
            a, b = map(int, question.split("+"))
            assert parsed.tool_calls[0]["function"] == {"name": "add", "arguments": {"a": a, "b": b}}
    assert 30 < calls < 100, "a minority uses the tool"

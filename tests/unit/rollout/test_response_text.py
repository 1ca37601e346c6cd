"""Text of responses of tokenizers that list the tags of thoughts and tool calls as special tokens."""

from __future__ import annotations

import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_dppo.rewards import extract_answer, math_reward
from megatron_dppo.rollout.response_text import decode_response
from megatron_dppo_answers.extract import is_well_formed
from megatron_dppo_answers.thinking import THINKING_TAGS, after_thinking
from tests.engines.tiny import byte_tokenizer

WORDS = ["I", " think", " 11", " no", " Answer", ": 12"]


def tokenizer(*tags: str, special: bool) -> PreTrainedTokenizerFast:
    names = ["<pad>", "<eos>", *WORDS]
    model = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<pad>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<eos>", pad_token="<pad>")
    fast.add_tokens([AddedToken(tag, special=special, normalized=False) for tag in tags])
    return fast


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(("opening", "closing"), THINKING_TAGS)
def test_thinking_tags_stay_in_the_text_and_all_other_special_tokens_leave(
    opening: str, closing: str, special: bool
) -> None:
    model = tokenizer(opening, closing, special=special)
    model.add_tokens([AddedToken("<|im_end|>", special=True, normalized=False)])
    names = [opening, "I", " think", ": 12", closing, " Answer", " 11", "<|im_end|>", "<eos>", "<pad>"]
    text = decode_response(model, model.convert_tokens_to_ids(names))
    assert text == f"{opening}I think: 12{closing} Answer 11"
    assert after_thinking(text) == " Answer 11"


def test_a_box_in_a_thought_is_no_answer_even_if_the_tags_are_special() -> None:
    model = tokenizer("<think>", "</think>", r"\boxed{11}", special=True)
    ids = model.convert_tokens_to_ids(["<think>", " Answer", ": 12", "</think>", " no", "<eos>"])
    assert extract_answer(decode_response(model, ids)) is None
    assert extract_answer(decode_response(model, model.convert_tokens_to_ids([" Answer", ": 12"]))) == "12"


def test_tags_of_tool_calls_stay() -> None:
    model = tokenizer("<tool_call>", "</tool_call>", special=True)
    ids = model.convert_tokens_to_ids(["<tool_call>", "I", "</tool_call>", "<eos>"])
    assert decode_response(model, ids) == "<tool_call>I</tool_call>"


HARMONY = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>"]


def test_the_chat_template_says_which_channel_is_the_answer() -> None:
    model = tokenizer(*HARMONY, special=True)
    model.add_tokens(["analysis", "final", "assistant", "commentary", r"\boxed{11}", r"\boxed{12}"])
    model.chat_template = "<|start|>assistant<|channel|>final<|message|>"
    start = ["<|start|>", "assistant", "<|channel|>"]
    thought = ["<|channel|>", "analysis", "<|message|>", r"\boxed{12}", "<|end|>", *start]
    unsure = [*thought, "final", "<|message|>", "I", " no", "<|return|>"]
    sure = [*thought, "final", "<|message|>", r"\boxed{11}", "<|return|>"]
    called = [*thought, "commentary", "<|message|>", r"\boxed{12}", "<|end|>"]
    texts = [decode_response(model, model.convert_tokens_to_ids(names)) for names in (unsure, sure, called, thought)]
    assert [after_thinking(text) for text in texts] == ["I no", r"\boxed{11}", "", ""]
    assert [extract_answer(text) for text in texts] == [None, "11", None, None]
    assert [is_well_formed(text) for text in texts] == [False, True, False, False]
    # Without the template no channel is known.
    model.chat_template = None
    assert extract_answer(decode_response(model, model.convert_tokens_to_ids(unsure))) == "12"


THOUGHT = "<|channel|>analysis<|message|>{other}<|end|><|start|>assistant"
FORMS = [
    f"{THOUGHT}<|channel|>final<|message|>{{said}}<|return|>",
    "<|channel|>final<|message|>{said}<|return|>",
    f"{THOUGHT}<|channel|>commentary<|message|>{{other}}<|end|><|start|>assistant<|channel|>final <|constrain|>json"
    "<|message|>{said}<|return|>",
]
"""Answers of gpt-oss as its published guide has them: with a thought, at once, and behind a note to the user."""


@pytest.mark.parametrize("form", FORMS)
def test_the_example_of_gpt_oss_is_rewarded_for_its_final_channel(form: str) -> None:
    spec = find_spec("trl")
    assert spec is not None and spec.origin is not None
    model = byte_tokenizer(["<|endoftext|>", "<|startoftext|>", *HARMONY])
    model.add_special_tokens({"additional_special_tokens": HARMONY})
    model.chat_template = (Path(spec.origin).parent / "chat_templates/gptoss.jinja").read_text(encoding="utf-8")
    config = tomllib.loads(Path("examples/gpt_oss_20b/dppo.toml").read_text())
    assert config["reward"]["function"] == "math"
    for said, expected in ((r"\boxed{4}", 1.0), (r"\boxed{5}", 0.0), ("I do not know.", 0.0)):
        other = r"\boxed{5}" if expected else r"\boxed{4}"
        ids = model(form.format(other=other, said=said), add_special_tokens=False).input_ids
        text = decode_response(model, ids)
        assert math_reward(prompt="", completion=text, label="4", metadata={}) == expected

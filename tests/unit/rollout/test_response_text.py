"""Text of responses of tokenizers that list the tags of thoughts and tool calls as special tokens."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_dppo.rewards import extract_answer
from megatron_dppo.rollout.response_text import decode_response
from megatron_dppo_answers.extract import is_well_formed
from megatron_dppo_answers.thinking import THINKING_TAGS, after_thinking

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

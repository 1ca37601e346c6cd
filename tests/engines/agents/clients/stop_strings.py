"""A ReAct loop, which ends a response before the observation: `anthropic`, otherwise openai."""

from __future__ import annotations

import sys
from typing import Any

import common
from anthropic import Anthropic
from openai import OpenAI

STOP = ["never", "\nObservation:"]


def ask_openai(messages: list[Any]) -> str:
    choice = (
        OpenAI(max_retries=0)
        .chat.completions.create(model="policy", messages=messages, max_tokens=256, stop=STOP)
        .choices[0]
    )
    assert choice.finish_reason == "stop"
    return choice.message.content or ""


def ask_anthropic(messages: list[Any]) -> str:
    client = Anthropic(base_url=common.anthropic_base(), api_key=common.anthropic_key(), max_retries=0)
    answer = client.messages.create(model="policy", messages=messages, max_tokens=256, stop_sequences=STOP)
    reason = (answer.stop_reason, answer.stop_sequence)
    assert reason == (("stop_sequence", STOP[1]) if len(messages) == 1 else ("end_turn", None)), reason
    return answer.content[0].text


def main() -> None:
    ask = ask_anthropic if "anthropic" in sys.argv[1:] else ask_openai
    messages = list(common.task()["messages"])
    first = ask(messages)
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "Observation: 3"}]
    common.note(first=first, last=ask(messages))
    common.reward(1)


if __name__ == "__main__":
    main()

"""openai: an agent that summarizes its history when it is long, and continues from the summary."""

from __future__ import annotations

import common
from openai import OpenAI

TURNS_A_WINDOW = 3


def main() -> None:
    task = common.task()
    client = OpenAI(max_retries=0)
    asked = sampled = 0
    messages = list(task["messages"])

    def ask(text: str | None = None) -> str:
        nonlocal asked, sampled
        if text is not None:
            messages.append({"role": "user", "content": text})
        response = client.chat.completions.create(model="policy", messages=messages, max_tokens=400)
        asked, sampled = asked + 1, sampled + response.usage.completion_tokens
        messages.append({"role": "assistant", "content": response.choices[0].message.content})
        return response.choices[0].message.content

    ask()
    for _ in range(TURNS_A_WINDOW - 1):
        ask("Go on.")
    summary = ask("Summarise what you have done.")
    messages[:] = [*task["messages"], {"role": "user", "content": f"Summary so far: {summary}"}]
    for turn in range(TURNS_A_WINDOW):
        ask("Go on." if turn else None)
    common.note(calls=asked, sampled=sampled, last=messages[-1]["content"])
    common.reward(1)


if __name__ == "__main__":
    main()

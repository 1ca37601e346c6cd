"""Write calls as the published encoders of models without a chat template do, by the interpreter of vLLM's environment.

Standard input: {"tools": [...], "arguments": [{...}, ...]}. Standard output: [[encoder, form, text of a response that
calls the tool twice], ...] for each of the arguments.
"""

import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Calls = Sequence[Mapping[str, Any]]


def deepseek_writer(mode: str) -> Callable[[Calls, Any], str]:
    """Return the encoder that DeepSeek publishes beside V3.2; vLLM has a copy."""
    package = importlib.util.find_spec("vllm")
    assert package is not None and package.origin is not None
    path = Path(package.origin).parent / "tokenizers" / "deepseek_v32_encoding.py"
    spec = importlib.util.spec_from_file_location("deepseek_v32_encoding", path)
    assert spec is not None and spec.loader is not None
    encoding = importlib.util.module_from_spec(spec)
    # By its path: importing vLLM takes 10 seconds.
    spec.loader.exec_module(encoding)

    def write(calls: Calls, tools: Any) -> str:
        messages = [{"role": "system", "content": "s", "tools": tools}, {"role": "user", "content": "q"}]
        prompt = encoding.encode_messages(messages, thinking_mode=mode)
        answer = {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": list(calls)}
        written = encoding.encode_messages([*messages, answer], thinking_mode=mode)
        assert written.startswith(prompt)
        # The prompt has opened the thought.
        opening = "<think>" if mode == "thinking" else ""
        return f"{opening}{written.removeprefix(prompt)}".removesuffix("<｜end▁of▁sentence｜>")

    return write


def mistral_writer(version: str) -> Callable[[Calls, Any], str]:
    """Return an encoder of Mistral's own package."""
    import mistral_common
    from mistral_common.protocol.instruct.messages import AssistantMessage
    from mistral_common.protocol.instruct.tool_calls import FunctionCall, ToolCall
    from mistral_common.tokens.tokenizers import instruct
    from mistral_common.tokens.tokenizers.base import TokenizerVersion
    from mistral_common.tokens.tokenizers.tekken import SpecialTokenPolicy, Tekkenizer

    stored = json.loads((Path(mistral_common.__file__).parent / "data" / "tekken_240911.json").read_text("utf-8"))
    # The package has the words of an old version alone; the later ones have more special tokens.
    special: list[Any] = [dict(token) for token in Tekkenizer.DEPRECATED_SPECIAL_TOKENS]
    names = {token["token_str"] for token in special}
    for name in ("[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"):
        if name not in names:
            special.append({"rank": len(special), "token_str": name, "is_control": True})
    config = stored["config"]
    sizes = (config["default_vocab_size"], config["default_num_special_tokens"])
    tokenizer = Tekkenizer(stored["vocab"], special, config["pattern"], *sizes, version=TokenizerVersion(version))
    encoder = getattr(instruct, f"InstructTokenizer{version.upper()}")(tokenizer)

    def write(calls: Calls, tools: Any) -> str:
        functions = [FunctionCall(**call["function"]) for call in calls]
        sent = [ToolCall(id=call["id"], function=each) for call, each in zip(calls, functions, strict=True)]
        message = AssistantMessage(content=None, tool_calls=sent)
        tokens = encoder.encode_assistant_message(message, is_before_last_user_message=False)
        return str(tokenizer.decode(tokens, SpecialTokenPolicy.KEEP)).removesuffix("</s>")

    return write


def main() -> None:
    """Write all calls."""
    given = json.load(sys.stdin)
    writers = {("deepseek_xml", mode): deepseek_writer(mode) for mode in ("chat", "thinking")}
    writers |= {("mistral", version): mistral_writer(version) for version in ("v3", "v7", "v11", "v13")}
    written = []
    for arguments in given["arguments"]:
        function = {"name": "add", "arguments": json.dumps(arguments, ensure_ascii=False)}
        calls = [{"id": f"callabcd{index}", "type": "function", "function": function} for index in range(2)]
        written.append([[name, form, write(calls, given["tools"])] for (form, name), write in writers.items()])
    json.dump(written, sys.stdout)


if __name__ == "__main__":
    main()

"""The reward ``reward_model``: SGLang or vLLM with a classification or embedding head."""

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from megatron_dppo.config.reward_options import RewardModelOptions
from megatron_dppo.errors import RewardError
from megatron_dppo.rewards.http import BadResponse, RequestBatcher, ScoringServers
from megatron_dppo.rewards.item import RewardItem
from megatron_dppo_answers.thinking import after_thinking
from megatron_dppo_conversations.chat_template import apply_chat_template

_Question = str | tuple[str, str] | list[int]
"""Text, two texts, or token ids."""


class RewardModel:
    """Scorer of one sample. Concurrent samples share requests."""

    def __init__(self, options: RewardModelOptions, table: str, now: datetime | None = None) -> None:
        self._options = options
        self._now = now or datetime.now()
        """Date that the model's chat template sees on every start of the run."""
        self._servers = ScoringServers(options, table)
        self._batches = RequestBatcher(self._send, options.batch_size)
        self._tokenizer = None if options.tokenizer is None else _load_tokenizer(options.tokenizer, table)

    async def __call__(self, item: RewardItem) -> float:
        """Return the score."""
        return self.read_score(await self._batches.submit(self._build_question(item)))

    def _build_question(self, item: RewardItem) -> _Question:
        """Return two texts, one text, or token ids, as the endpoint expects."""
        completion = after_thinking(item.completion).lstrip() if self._options.after_thinking else item.completion
        if self._options.endpoint == "vllm_score":
            return item.prompt, completion
        if self._tokenizer is None:
            return item.prompt + completion
        messages = item.messages or ({"role": "user", "content": item.prompt},)
        answer = {"role": "assistant", "content": completion}
        chat: list[Mapping[str, object]] = [*(dict(message) for message in messages), answer]
        return apply_chat_template(self._tokenizer, chat, self._now, tokenize=True)

    async def _send(self, questions: Sequence[_Question]) -> list[list[float]]:
        path, make, read = _ENDPOINTS[self._options.endpoint]
        body = make(list(questions)) | ({"model": self._options.model} if self._options.model else {})
        response = await self._servers.post(path, body)
        try:
            rows = read(response)
        except (KeyError, TypeError, AttributeError) as error:
            raise BadResponse(f"{path}: the response does not have the format of {self._options.endpoint!r}") from error
        if len(rows) != len(questions):
            raise BadResponse(f"{path}: expected {len(questions)} results, got {len(rows)}")
        return [_last_row(row) for row in rows]

    def read_score(self, row: list[Any]) -> float:
        """Return the score in the numbers that a server returned for one response."""
        index = self._options.index
        if any(isinstance(x, bool) or not isinstance(x, int | float) or not math.isfinite(x) for x in row):
            raise BadResponse(f"expected finite numbers in the server's response, got {str(row)[:100]}")
        if index is None and len(row) != 1:
            raise BadResponse(
                f"the server's response has {len(row)} numbers; set options.index to the position of the score"
            )
        if (index or 0) >= len(row):
            raise BadResponse(f"options.index = {index}, but the server's response has {len(row)} numbers")
        logit = float(row[index or 0])
        if self._options.output == "sigmoid":
            # Two forms of the sigmoid, so that exp cannot overflow for either sign.
            return 1 / (1 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1 + math.exp(logit))
        if self._options.output == "softmax":
            # Subtract the maximum, so that exp cannot overflow.
            largest = max(row)
            return math.exp(logit - largest) / sum(math.exp(x - largest) for x in row)
        return logit


def _last_row(row: object) -> list[Any]:
    """Return the numbers of one sample, or of its last token if the server returns some for every token."""
    if isinstance(row, list) and row and isinstance(row[-1], list):
        row = row[-1]
    if not isinstance(row, list) or not row:
        raise BadResponse(f"the server's response has no numbers: {str(row)[:100]}")
    return row


def _sglang_body(questions: Sequence[_Question]) -> dict[str, object]:
    return {"text" if isinstance(questions[0], str) else "input_ids": questions}


def _sglang_rows(response: Any) -> list[Any]:
    return [each["embedding"] for each in (response if isinstance(response, list) else [response])]


def _vllm_body(questions: Sequence[_Question]) -> dict[str, object]:
    return {"input": questions, "use_activation": False}


def _pairs_body(questions: Sequence[Any]) -> dict[str, object]:
    return {"text_1": [a for a, _ in questions], "text_2": [b for _, b in questions], "use_activation": False}


def _data_rows(name: str) -> Callable[[Any], list[Any]]:
    def read(response: Any) -> list[Any]:
        # Servers may return the results in any order; the index says which question each belongs to.
        data = sorted(response["data"], key=lambda each: int(each["index"]))
        if [each["index"] for each in data] != list(range(len(data))):
            raise BadResponse("the indices of the response are not 0, 1, 2 ...")
        return [[each[name]] if name == "score" else each[name] for each in data]

    return read


_ENDPOINTS: dict[str, tuple[str, Callable[[Sequence[_Question]], dict[str, object]], Callable[[Any], list[Any]]]] = {
    "sglang_classify": ("/classify", _sglang_body, _sglang_rows),
    "vllm_classify": ("/classify", _vllm_body, _data_rows("probs")),
    "vllm_pooling": ("/pooling", _vllm_body, _data_rows("data")),
    "vllm_score": ("/score", _pairs_body, _data_rows("score")),
    "openai_embeddings": ("/v1/embeddings", lambda questions: {"input": questions}, _data_rows("embedding")),
}
"""Path, function that builds the request body, and function that reads the numbers. vLLM calls logits ``probs`` if no
activation is used."""


def _load_tokenizer(folder: str, table: str) -> Any:
    from transformers import AutoTokenizer

    setting = f"{table}.options.tokenizer = {folder!r}"
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        raise RewardError(f"{setting} cannot be loaded: {error}. Expected a folder with tokenizer files") from error
    if not getattr(tokenizer, "chat_template", None):
        raise RewardError(f"{setting} has no chat template; remove it to send the plain texts")
    return tokenizer

"""Packed prompts against a plain list of them: equal values of equal types, the same order, the same digest."""

from __future__ import annotations

import datetime as dt
import hashlib
import math
import random
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dppo.data.chat import load_tokenizer
from megatron_dppo.data.data_rows import DataRow
from megatron_dppo.data.prompts import PackedList, PromptDataset, load_rows
from megatron_dppo.errors import DataError
from megatron_dppo.parallel.objects import from_message, to_message
from megatron_dppo.types import Prompt
from megatron_dppo_lab.supervised import SupervisedDataset
from tests.unit.data_files import write_jsonl

MODEL = Path(__file__).parents[3] / "examples/chain_sum/model"
TOKENIZER = load_tokenizer(MODEL)
LIMITS: dict[str, Any] = {"max_prompt_tokens": 10**6, "max_new_tokens": 1, "context_length": 10**7}
BERLIN = ZoneInfo("Europe/Berlin")


class Bytes:
    """Any text is its UTF-8 bytes, some of them far above a byte; messages are written one after the other."""

    chat_template = "messages"

    def __call__(self, text: str, add_special_tokens: bool = True) -> Any:
        out = type("Encoded", (), {})()
        out.input_ids = [byte * 8_000_000 for byte in text.encode("utf-8", "surrogatepass")]
        return out

    def apply_chat_template(self, messages: list[dict[str, Any]], **_: Any) -> str:
        return "|".join(f"{m['role']}:{m['content']}" for m in messages)


AWKWARD: list[Any] = [
    {},
    {"": None, "none": None, "true": True, "one": 1, "float one": 1.0, "false": False, "zero": 0, "minus": -0.0},
    {"tiny": 1e-300, "smallest": 5e-324, "largest": 1.7976931348623157e308, "inf": math.inf, "third": 1 / 3},
    {"big": 10**400, "most": 10**4299, "more than Python writes": -(10**6000), "u64": 2**64 - 1},
    {"text": 'é 漢字 \U0001f600 \0 \r\n \u2028 \ufeff " \\ \\u0000', "\U0001f600": "key", "\0": "a key like ours"},
    {"\0": "tuple", "of": [1, 2]},
    {"deep": {"a": [{"b": [[], {}, [None, {"\0": {}}]]}]}, "order": {"z": 1, "a": 2, "m": 3}},
    {"tuple": (1, (2.0, [True]), ()), "list": [1, [2.0, [True]], []], "keys": {1: "a", (1, 2): "b", None: "c", "1": 2}},
    {"set": {1, "a"}, "frozen": frozenset({(1, 2)}), "bytes": b"\xff\0", "empty": b"", "uuid": uuid.UUID(int=7)},
    {"decimals": [Decimal("1.50"), Decimal("-0"), Decimal("1E+500"), Decimal("1.5")]},
    {
        "naive": dt.datetime(2024, 2, 29, 1, 2, 3, 4),
        "zone": dt.datetime(2024, 10, 27, 2, 30, tzinfo=BERLIN, fold=1),
        "offset": dt.datetime(1, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=5, minutes=30), "named")),
        "utc": dt.datetime(9999, 12, 31, tzinfo=dt.UTC),
        "rest": [dt.date(1, 1, 1), dt.time(23, 59, 59, 999999), dt.timedelta(days=-3, microseconds=1)],
    },
    {"numpy": [np.float64(0.1), np.float32(0.1), np.int8(-3), np.bool_(True), np.str_("é"), np.datetime64(3, "ns")]},
    {
        "pandas": [
            pandas.Timestamp(7),
            pandas.Timestamp(7, tz=BERLIN),
            pandas.Timedelta(-7),
            pandas.Timestamp(1, unit="s"),
        ]
    },
    {"long": "x" * 200_000, "wide": list(range(20_000))},
]


def exact(value: Any) -> Any:
    """A form in which values are equal only if their types, the order of keys and the bits of floats are."""
    kind = type(value)
    if kind in (float, int):
        return kind, value.hex() if kind is float else hex(value)
    if isinstance(value, dict):
        return kind, [(exact(k), exact(v)) for k, v in value.items()]
    if kind in (list, tuple):
        return kind, [exact(part) for part in value]
    if kind in (set, frozenset):
        return kind, sorted(map(repr, map(exact, value)))
    if isinstance(value, dt.datetime):
        return kind, value.isoformat(), value.fold, repr(value.tzinfo), getattr(value, "unit", None)
    return kind, repr(value)


def rows() -> list[DataRow]:
    """Plain and chat rows with every awkward value as metadata, and as a further key of a message."""
    made = []
    for i, metadata in enumerate(AWKWARD):
        text = f"{i}: é \U0001f600 {metadata.get('text', '')}" + "x" * (i * 7 % 5)
        made.append(DataRow(f"a.jsonl:{i}", text, f"l{i} \u2028", metadata))
        messages = [{"role": "system", "content": ""}, {"role": "user", "content": text, "more": metadata}]
        made.append(DataRow(f"b é.parquet:{i}", messages, "", {"x": metadata}))
    return made


def plain(given: list[DataRow], tokenizer: Any) -> list[Prompt]:
    """Return the prompts of the data set, one object a row."""
    made = []
    for row in given:
        chat = not isinstance(row.prompt, str)
        text = tokenizer.apply_chat_template(row.prompt) if chat else row.prompt
        messages = tuple(row.prompt) if chat else None
        ids = tuple(tokenizer(text).input_ids)
        made.append(
            Prompt(
                prompt_id=row.location,
                text=text,
                token_ids=ids,
                label=row.label,
                metadata=row.metadata,
                messages=messages,  # type: ignore[arg-type]
            )
        )
    return made


def test_each_packed_prompt_equals_the_original_with_the_same_types() -> None:
    given, tokenizer = rows(), Bytes()
    expected = plain(given, tokenizer)
    actual = PromptDataset(given, tokenizer, **LIMITS)
    received = from_message(to_message(actual))
    for data in (actual, received):
        assert len(data) == len(expected) and data.longest == max(len(p.token_ids) for p in expected)
        for index, prompt in enumerate(expected):
            assert data[index] == prompt
            assert exact(vars(data[index])) == exact(vars(prompt))
            assert all(type(token) is int for token in data[index].token_ids)
    assert (received.fingerprint(), received.num_dropped) == (actual.fingerprint(), 0)


def test_changing_a_returned_prompt_does_not_change_the_data_set() -> None:
    data = PromptDataset([DataRow("a:1", "1", "1", {"list": [1]})], TOKENIZER, **LIMITS)
    data[0].metadata["list"].append(2)
    assert data[0].metadata == {"list": [1]}


def test_the_order_and_the_digest_equal_those_of_a_list() -> None:
    """The digest below was written by the program that held a list of prompts: checkpoints have it."""
    given = [DataRow(f"rows.jsonl:{i}", f"{i}+{i + 1}=", str(2 * i + 1), {"level": i}) for i in range(5)]
    data = PromptDataset(given, TOKENIZER, max_prompt_tokens=16, max_new_tokens=40, context_length=256, seed=3)
    order = []
    for epoch in range(3):
        numbers = list(range(5))
        random.Random(f"3/{epoch}").shuffle(numbers)
        order += [f"rows.jsonl:{i}" for i in numbers]
    assert [data[i].prompt_id for i in range(15)] == order
    assert [int(place[-1]) for place in order] == ORDER
    text = "".join(f"{tuple(TOKENIZER(row.prompt).input_ids)} {row.label}\n" for row in given)
    assert data.fingerprint() == f"5 prompts, {hashlib.sha256(text.encode()).hexdigest()[:12]}" == DIGEST
    received = from_message(to_message(data))
    assert [received[i] for i in (14, 0, 7)] == [data[i] for i in (14, 0, 7)] and received.fingerprint() == DIGEST
    other = PromptDataset([*given[:4], DataRow("r:5", "4+5=", "8")], TOKENIZER, **LIMITS)
    assert other.fingerprint() != DIGEST


ORDER = [1, 0, 2, 3, 4, 1, 2, 0, 3, 4, 2, 1, 0, 4, 3]
DIGEST = "5 prompts, 858296c9dacb"


def test_dropped_prompts_are_counted_and_not_stored() -> None:
    given = [DataRow("r:1", "1+1=", "2"), DataRow("r:2", "1+1+1+1+1=", "5"), DataRow("r:3", "2+2=", "4")]
    data = PromptDataset(given, TOKENIZER, max_prompt_tokens=6, max_new_tokens=1, context_length=99, overlong="drop")
    kept = PromptDataset([given[0], given[2]], TOKENIZER, **LIMITS)
    assert data.num_dropped == 1 == from_message(to_message(data)).num_dropped and data.longest == kept.longest
    assert [data[i] for i in range(4)] == [kept[i] for i in range(4)] and data.fingerprint() == kept.fingerprint()


def test_prompts_take_little_more_memory_than_their_text() -> None:
    given = [DataRow(f"a:{i}", "1+1=" * 20, "2", {"level": i}) for i in range(200)]
    message = to_message(PromptDataset(given, TOKENIZER, **LIMITS))
    assert len(message) < 200 * (80 + 80 * 3 + 150)
    with pytest.raises(IndexError):
        PackedList([1])[1]


def values() -> st.SearchStrategy[Any]:
    text = st.text(st.characters() | st.sampled_from("\0\ud800\udfff")) | st.sampled_from(["\0", "of", "tuple"])
    leaves = [st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), text, st.binary(), st.uuids()]
    leaves += [st.decimals(allow_nan=False), st.dates(), st.times(), st.timedeltas(), st.datetimes()]
    leaves += [st.datetimes(timezones=st.timezones())]
    keys = text | st.integers() | st.tuples(text)
    return st.recursive(
        st.one_of(leaves),
        lambda part: st.lists(part) | st.lists(part).map(tuple) | st.dictionaries(keys, part) | st.frozensets(keys),
        max_leaves=8,
    )


@settings(max_examples=300, deadline=None, database=None, derandomize=True)
@given(st.lists(values(), max_size=3))
def test_any_values_round_trip(given: list[Any]) -> None:
    for packed in (PackedList(given), from_message(to_message(PackedList(iter(given))))):
        assert len(packed) == len(given) and exact(list(packed)) == exact(given)


def test_every_type_of_a_parquet_file_round_trips(tmp_path: Path) -> None:
    a, file = pyarrow.array, str(tmp_path / "rows.parquet")
    columns = {
        "prompt": a(["1+1=", "1+2="]),
        "label": a(["2", "3"]),
        "us": a([0, None], pyarrow.timestamp("us")),
        "ns": a([1577840523000000001, None], pyarrow.timestamp("ns")),
        "zone": a([0, 10**15], pyarrow.timestamp("us", "Europe/Berlin")),
        "ns zone": a([7, 10**18], pyarrow.timestamp("ns", "+05:30")),
        "date": a([dt.date(2020, 1, 1), None]),
        "time": a([dt.time(1, 2, 3, 4), None]),
        "duration": a([7, None], pyarrow.duration("ns")),
        "seconds": a([7, None], pyarrow.duration("s")),
        "decimal": a([Decimal("1.50"), None]),
        "binary": a([b"\xff", b""]),
        "half": a(np.array([0.1, math.inf], np.float16)),
        "float": a([0.1, -0.0], pyarrow.float32()),
        "u64": a([2**64 - 1, 0], pyarrow.uint64()),
        "map": a([[("a", 1)], []], pyarrow.map_(pyarrow.string(), pyarrow.int64())),
        "struct": a([{"x": [{"y": b"z"}]}, None]),
        "category": a(["a", "b"]).dictionary_encode(),
    }
    if hasattr(pyarrow, "uuid"):
        columns["uuid"] = a([uuid.UUID(int=1).bytes, None], pyarrow.uuid())
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    loaded = load_rows(file, "train").rows
    data = PromptDataset(loaded, TOKENIZER, **LIMITS)
    for index, row in enumerate(loaded):
        assert exact(data[index].metadata) == exact(row.metadata) and data[index].metadata == row.metadata
    kinds = {type(value).__name__ for value in data[0].metadata.values()}
    assert {"Timestamp", "Timedelta", "Decimal", "bytes", "datetime"} <= kinds


def test_an_object_that_cannot_be_packed_is_rejected_with_its_row() -> None:
    class Mine:
        pass

    class Text(str):
        __slots__ = ()

    for odd in (Mine(), Text("a"), math):
        with pytest.raises(DataError, match=r"a\.jsonl:3: .*holds an object"):
            PromptDataset([DataRow("a.jsonl:3", "1", "1", {"x": [odd]})], TOKENIZER, **LIMITS)


def test_supervised_samples_are_those_of_the_pairs(tmp_path: Path) -> None:
    pairs = [{"prompt": f"{i}+1=", "response": "" if i == 3 else f"{i + 1}"} for i in range(9)]
    source = write_jsonl(tmp_path / "pairs.jsonl", pairs)
    here = SupervisedDataset(source, TOKENIZER, 5)
    assert list(here.pairs) == [
        (f"pairs.jsonl:{i + 1}", pair["prompt"], pair["response"]) for i, pair in enumerate(pairs)
    ]
    for index in range(40):
        pair = random.Random(f"5/{index}").choice(pairs)
        ids = [*TOKENIZER(pair["prompt"]).input_ids, *TOKENIZER(pair["response"], add_special_tokens=False).input_ids]
        assert here[index].tokens.tolist() == ids and here[index].labels.tolist() == [*ids[1:], 2]

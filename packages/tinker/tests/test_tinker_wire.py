"""Messages of the Tinker API against Google's library, which gets the schema of the SDK here; and hostile bytes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from megatron_dppo_tinker import protobuf, wire
from megatron_dppo_tinker.errors import RequestError
from megatron_dppo_tinker.wire import SampledSequence, read_forward_backward, write_forward_output, write_samples

# name of a message: {field: (number, type, repeated)}; a type that begins with a capital is a message.
SCHEMA = {
    "Text": {"tokens": (1, "bytes", False)},
    "Chunk": {"encoded_text": (1, "Text", False), "image": (2, "Text", False)},
    "Tensor": {
        "dense": (1, "bytes", False),
        "sparse_csr": (2, "Text", False),
        "dtype": (3, "int32", False),
        "shape": (4, "int64", True),
    },
    "TensorEntry": {"key": (1, "string", False), "value": (2, "Tensor", False)},
    "Datum": {
        "model_input": (1, "Chunk", True),
        "loss_fn_inputs": (2, "TensorEntry", True),
        "spans": (3, "Text", True),
    },
    "NumberEntry": {"key": (1, "string", False), "value": (2, "double", False)},
    "Value": {"number": (1, "double", False), "text": (2, "string", False)},
    "ValueEntry": {"key": (1, "string", False), "value": (2, "Value", False)},
    "Request": {
        "model_id": (1, "string", False),
        "seq_id": (2, "int32", False),
        "data": (3, "Datum", True),
        "loss_fn": (4, "string", False),
        "loss_fn_config": (5, "NumberEntry", True),
        "forward_only": (6, "bool", False),
        "loss_fn_config_v2": (7, "ValueEntry", True),
    },
    "Batched": {
        "data": (1, "bytes", False),
        "offsets": (2, "bytes", False),
        "dtype": (3, "int32", False),
        "trailing_shape": (4, "int64", True),
    },
    "BatchedEntry": {"key": (1, "string", False), "value": (2, "Batched", False)},
    "Record": {
        "type_tag": (1, "string", False),
        "fields": (2, "BatchedEntry", True),
        "num_datums": (3, "int64", False),
    },
    "Output": {
        "loss_fn_output_type": (1, "string", False),
        "loss_fn_outputs": (2, "Record", True),
        "metrics": (3, "NumberEntry", True),
    },
    "Sequence": {"stop_reason": (1, "int32", False), "tokens": (2, "bytes", False), "logprobs": (3, "bytes", False)},
    "Samples": {"sequences": (1, "Sequence", True), "prompt_logprobs": (2, "bytes", False)},
}
_TYPES = {"double": 1, "int64": 3, "int32": 5, "bool": 8, "string": 9, "bytes": 12}


def message(name: str) -> Any:
    """An empty message of Google's library."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"test.{name}"))()


def _pool() -> descriptor_pool.DescriptorPool:
    file = descriptor_pb2.FileDescriptorProto(name="test.proto", package="test", syntax="proto3")
    for name, fields in SCHEMA.items():
        described = file.message_type.add(name=name)
        for field, (number, kind, is_repeated) in fields.items():
            added = described.field.add(name=field, number=number, label=3 if is_repeated else 1)
            added.type = _TYPES.get(kind, 11)
            if kind not in _TYPES:
                added.type_name = f".test.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


_POOL = _pool()


def add_tensor(datum: Any, name: str, values: np.ndarray, *, shape: bool = True) -> None:
    entry = datum.loss_fn_inputs.add(key=name)
    entry.value.dense = values.tobytes()
    entry.value.dtype = {"float32": 1, "int64": 2}[values.dtype.name]
    if shape:
        entry.value.shape.extend(values.shape)


def request(seed: int = 0) -> Any:
    """A valid request with random contents."""
    rng = np.random.default_rng(seed)
    body = message("Request")
    body.model_id = "a:train:0"
    body.seq_id = int(rng.integers(0, 2**31))
    body.loss_fn = "importance_sampling"
    body.forward_only = bool(seed % 2)
    body.loss_fn_config.add(key="old", value=1.0)
    body.loss_fn_config_v2.add(key="number").value.number = float(rng.normal())
    body.loss_fn_config_v2.add(key="text").value.text = "küche"
    for _ in range(int(rng.integers(1, 5))):
        datum = body.data.add()
        count = int(rng.integers(1, 200))
        tokens = rng.integers(0, 2**31 - 1, count, dtype=np.int32)
        cut = int(rng.integers(0, count + 1))
        for part in (tokens[:cut], tokens[cut:]):
            datum.model_input.add().encoded_text.tokens = part.tobytes()
        datum.spans.add().tokens = b"x"
        add_tensor(datum, "target_tokens", rng.integers(0, 300, count), shape=seed % 3 > 0)
        add_tensor(datum, "advantages", rng.normal(size=count).astype(np.float32))
    return body


@pytest.mark.parametrize("seed", range(20))
def test_a_request_is_read_as_it_was_written(seed: int) -> None:
    body = request(seed)
    parsed = read_forward_backward(body.SerializeToString())
    assert (parsed.model_id, parsed.seq_id, parsed.loss_fn) == (body.model_id, body.seq_id, body.loss_fn)
    assert parsed.forward_only == body.forward_only
    assert parsed.loss_fn_config == {"number": body.loss_fn_config_v2[0].value.number, "text": "küche"}
    assert len(parsed.data) == len(body.data)
    for datum, sent in zip(parsed.data, body.data, strict=True):
        raw = b"".join(chunk.encoded_text.tokens for chunk in sent.model_input)
        assert datum.tokens.tolist() == np.frombuffer(raw, np.int32).tolist()
        for entry in sent.loss_fn_inputs:
            dtype = np.int64 if entry.value.dtype == 2 else np.float32
            assert datum.loss_inputs[entry.key].numpy().tobytes() == np.frombuffer(entry.value.dense, dtype).tobytes()


def test_an_older_configuration_counts_without_the_new_one_and_zero_is_no_gap() -> None:
    body = request()
    del body.loss_fn_config_v2[:]
    body.loss_fn_config.add(key="zero")
    assert read_forward_backward(body.SerializeToString()).loss_fn_config == {"old": 1.0, "zero": 0.0}
    body.loss_fn_config_v2.add(key="zero").value.number = 0.0
    assert read_forward_backward(body.SerializeToString()).loss_fn_config == {"zero": 0.0}


def test_parts_that_are_not_served_are_refused_by_name() -> None:
    body = request()
    body.data[0].model_input.add().image.tokens = b"png"
    with pytest.raises(RequestError, match="an image"):
        read_forward_backward(body.SerializeToString())
    body = request()
    body.data[0].loss_fn_inputs[0].value.sparse_csr.tokens = b""
    with pytest.raises(RequestError, match="sparse"):
        read_forward_backward(body.SerializeToString())


def field(number: int, content: bytes) -> bytes:
    """A length-delimited field."""
    body = message("Text")
    body.tokens = content
    return bytes([number << 3 | 2]) + body.SerializeToString()[1:] if content else bytes([number << 3 | 2, 0])


SMALL_FIELDS = {
    "empty data": lambda count: field(3, b"") * count,
    "empty chunks of one datum": lambda count: field(3, field(1, b"") * count),
    "empty inputs of one datum": lambda count: field(3, field(2, field(2, b"\x18\1")) * count),
    "spans of one datum": lambda count: field(3, field(3, b"") * count),
    "empty entries of the configuration": lambda count: field(7, b"\n\0") * count,
    "numbers of the old configuration": lambda count: field(5, b"\n\0") * count,
    "sizes of a shape, one by one": lambda count: field(3, field(2, field(2, b"\x18\1" + b"\x20\1" * count))),
    "sizes of a shape, packed": lambda count: field(3, field(2, field(2, b"\x18\1" + field(4, b"\1" * count)))),
    "values of a number, repeated": lambda count: b"\x10\1" * count,
    "chunks in many data": lambda count: field(3, field(1, b"") * 1000) * (count // 1000),
}


@pytest.mark.parametrize("name", SMALL_FIELDS)
def test_a_million_small_fields_are_refused_after_a_limited_number(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def count(message: memoryview, position: int, inner: Any = protobuf.read_varint) -> tuple[int, int]:
        nonlocal calls
        calls += 1
        return inner(message, position)

    monkeypatch.setattr(protobuf, "read_varint", count)
    with pytest.raises(RequestError, match=r"more than \d+ (data|fields|dimensions)"):
        read_forward_backward(SMALL_FIELDS[name](1_000_000))
    # A tag and a length for each field that is read.
    assert calls <= 2 * (wire.MAX_FIELDS + 10)


def test_the_largest_request_of_the_sdk_is_read() -> None:
    body = message("Request")
    for _ in range(1024):
        datum = body.data.add()
        for _ in range(8):
            datum.model_input.add().encoded_text.tokens = np.arange(2, dtype=np.int32).tobytes()
        for name in ("target_tokens", "logprobs", "advantages"):
            add_tensor(datum, name, np.zeros(16, np.float32), shape=True)
    assert len(read_forward_backward(body.SerializeToString()).data) == 1024


def test_answers_are_read_by_googles_library() -> None:
    logprobs = [torch.tensor([-0.5, -1.25]), torch.tensor([-3.0]), torch.zeros(0)]
    output = message("Output")
    output.ParseFromString(write_forward_output(logprobs, {"loss:sum": -2.5, "tokens:sum": 3.0}))
    assert {entry.key: entry.value for entry in output.metrics} == {"loss:sum": -2.5, "tokens:sum": 3.0}
    (record,) = output.loss_fn_outputs
    (entry,) = record.fields
    assert (record.num_datums, entry.key, entry.value.dtype) == (3, "logprobs", 1)
    assert np.frombuffer(entry.value.offsets, np.int64).tolist() == [0, 8, 12, 12]
    assert np.frombuffer(entry.value.data, np.float32).tolist() == [-0.5, -1.25, -3.0]

    sequences = [
        SampledSequence(torch.tensor([5, 300]), torch.tensor([-0.5, -0.25]), "length"),
        SampledSequence(torch.tensor([1]), torch.tensor([-2.0]), "stop"),
    ]
    samples = message("Samples")
    samples.ParseFromString(write_samples(sequences, torch.tensor([torch.nan, -4.0])))
    assert [each.stop_reason for each in samples.sequences] == [1, 0]
    assert np.frombuffer(samples.sequences[0].tokens, np.int32).tolist() == [5, 300]
    assert np.frombuffer(samples.sequences[1].logprobs, np.float32).tolist() == [-2.0]
    assert np.frombuffer(samples.prompt_logprobs, np.float32)[1] == -4.0
    assert not write_samples([], None)


@pytest.mark.parametrize("seed", range(40))
def test_hostile_bytes_are_refused_in_words_and_never_crash(seed: int) -> None:
    rng = random.Random(seed)
    valid = bytearray(request(seed).SerializeToString())
    for _ in range(50):
        body = bytearray(rng.randbytes(rng.randrange(200))) if rng.random() < 0.3 else bytearray(valid)
        for _ in range(rng.randrange(1, 6)):
            if body:
                body[rng.randrange(len(body))] = rng.randrange(256)
        body = body[: rng.randrange(len(body) + 1)] if rng.random() < 0.5 else body
        try:
            read_forward_backward(bytes(body))
        except RequestError as error:
            assert len(str(error)) < 400

"""Digests of what is sent against those that servers form: SGLang's own hash, and fusions cut by tensor parallelism."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import Tensor

from megatron_dppo.export.quantization import Quantization, fp8_blocks, quantize_stream
from megatron_dppo.weights.digests import StreamDigests
from megatron_dppo.weights.judge import Proof, ServerRecord
from megatron_dppo_engines.serving.vllm_extension.megatron_dppo_digest import PartsDigest, tensor_digest
from megatron_dppo_engines.weight_digests import RankDigests, WeightLayout

HEADS, KV_HEADS, DIM, HIDDEN, EXPERTS, INTER, VOCAB = 4, 2, 4, 8, 4, 16, 70
SGLANG_GPU_HASH = [
    # SGLang 0.5.23's gpu_tensor_hash itself, in Triton's interpreter, of ``pattern``
    (1, torch.float32, "70ac04b21c46fd41"),
    (3, torch.bfloat16, "ba998d2b9c19f8fb"),
    (5000, torch.bfloat16, "073d55045a80f8cb"),
    (20001, torch.bfloat16, "df7ea7b096120891"),
    (30001, torch.float32, "e40c21b507cddff1"),
]


def pattern(count: int, dtype: torch.dtype) -> Tensor:
    return (torch.arange(count * dtype.itemsize) * 2654435761 % 251).to(torch.uint8).view(dtype)


def sha(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


@pytest.mark.parametrize(("count", "dtype", "digest"), SGLANG_GPU_HASH)
def test_the_hash_of_words_is_that_of_sglang_also_in_parts_that_come_in_any_order(
    count: int, dtype: torch.dtype, digest: str
) -> None:
    data = pattern(count, dtype)
    for size in (count, 4096, 777):
        parts = PartsDigest("words")
        for start in reversed(range(0, count, size)):
            parts.add(start * dtype.itemsize, data[start : start + size])
        assert parts.hexdigest() == digest


def test_sha256_in_parts_that_come_in_any_order_is_that_of_all_bytes() -> None:
    data = torch.randn(1000)
    parts = PartsDigest("sha256")
    for start in (500, 0, 750, 250):
        parts.add(start * 4, data[start : start + 250])
    assert parts.hexdigest() == sha(data) and tensor_digest(data) == f"sha256:{sha(data)}"


def layer() -> dict[str, Tensor]:
    """A Qwen3-MoE of one layer, a dense layer's MLP beside it."""
    torch.manual_seed(0)
    attention = {"q": HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * DIM}
    weights = {f"model.layers.0.self_attn.{p}_proj.weight": torch.randn(n, HIDDEN) for p, n in attention.items()}
    weights |= {f"model.layers.0.self_attn.{p}_proj.bias": torch.randn(n) for p, n in attention.items()}
    weights["model.layers.0.self_attn.o_proj.weight"] = torch.randn(HIDDEN, HEADS * DIM)
    weights["model.layers.0.mlp.gate.weight"] = torch.randn(EXPERTS, HIDDEN)
    # The order of two expert-parallel ranks.
    for i in (0, 2, 1, 3):
        for part in ("gate", "up"):
            weights[f"model.layers.0.mlp.experts.{i}.{part}_proj.weight"] = torch.randn(INTER, HIDDEN)
        weights[f"model.layers.0.mlp.experts.{i}.down_proj.weight"] = torch.randn(HIDDEN, INTER)
    weights |= {f"model.layers.1.mlp.{part}_proj.weight": torch.randn(INTER, HIDDEN) for part in ("gate", "up")}
    weights["model.layers.1.mlp.down_proj.weight"] = torch.randn(HIDDEN, INTER)
    weights |= {"model.norm.weight": torch.randn(HIDDEN), "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN)}
    return weights | {"lm_head.weight": torch.randn(VOCAB, HIDDEN)}


def on_server(w: dict[str, Tensor], rank: int, size: int) -> dict[str, Tensor]:
    """Return the tensors that a rank of a server allocates and fills, slice by slice."""
    heads, kv = HEADS // size, max(KV_HEADS // size, 1)
    first_kv = rank * KV_HEADS // size
    rows = {"q": slice(rank * heads * DIM, (rank + 1) * heads * DIM)}
    rows["k"] = rows["v"] = slice(first_kv * DIM, (first_kv + kv) * DIM)
    own = slice(rank * INTER // size, (rank + 1) * INTER // size)
    inputs = slice(rank * HEADS * DIM // size, (rank + 1) * HEADS * DIM // size)
    result = {"model.norm.weight": w["model.norm.weight"]}
    result["model.layers.0.mlp.gate.weight"] = w["model.layers.0.mlp.gate.weight"]
    for kind in ("weight", "bias"):
        parts = [w[f"model.layers.0.self_attn.{p}_proj.{kind}"][rows[p]] for p in "qkv"]
        result[f"model.layers.0.self_attn.qkv_proj.{kind}"] = torch.cat(parts)
    result["model.layers.0.self_attn.o_proj.weight"] = w["model.layers.0.self_attn.o_proj.weight"][:, inputs]
    w13, w2 = torch.zeros(EXPERTS, 2 * INTER // size, HIDDEN), torch.zeros(EXPERTS, HIDDEN, INTER // size)
    for i in range(EXPERTS):
        prefix = f"model.layers.0.mlp.experts.{i}"
        w13[i, : INTER // size] = w[f"{prefix}.gate_proj.weight"][own]
        w13[i, INTER // size :] = w[f"{prefix}.up_proj.weight"][own]
        w2[i] = w[f"{prefix}.down_proj.weight"][:, own]
    result |= {"model.layers.0.mlp.experts.w13_weight": w13, "model.layers.0.mlp.experts.w2_weight": w2}
    gate, up = (w[f"model.layers.1.mlp.{p}_proj.weight"][own] for p in ("gate", "up"))
    result["model.layers.1.mlp.gate_up_proj.weight"] = torch.cat([gate, up])
    result["model.layers.1.mlp.down_proj.weight"] = w["model.layers.1.mlp.down_proj.weight"][:, own]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        padded = torch.zeros(128, HIDDEN)
        padded[:VOCAB] = w[name]
        result[name] = padded[rank * 128 // size : (rank + 1) * 128 // size]
    return result


@pytest.mark.parametrize("algorithm", ["sha256", "words"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_digests_are_predicted_for_every_rank(algorithm: str, size: int) -> None:
    weights = layer()
    layout = WeightLayout(algorithm=algorithm, tp_size=size, plain=True)  # type: ignore[arg-type]
    stream = StreamDigests([layout], KV_HEADS)
    assert [name for name, _ in stream.watch(weights.items())] == list(weights)
    for rank in range(size):
        held = on_server(weights, rank, size)
        digests = stream.expected(layout, rank)
        assert digests.keys() == held.keys()
        for name, tensor in held.items():
            parts = PartsDigest(algorithm)
            parts.add(0, tensor)
            assert digests[name].digest == (sha(tensor) if algorithm == "sha256" else parts.hexdigest()), name
    assert (
        digests["model.layers.0.mlp.experts.w13_weight"].sent_as == "model.layers.0.mlp.experts.*.{gate,up}_proj.weight"
    )


@pytest.mark.parametrize("size", [1, 2])
def test_digests_of_fp8_blocks_and_scales_are_predicted_for_every_rank(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Cut between blocks, a rank's part of the quantised weights is its part of the weights, quantised.
    for name, value in dict(DIM=128, HIDDEN=128, EXPERTS=4, INTER=256).items():
        monkeypatch.setitem(globals(), name, value)
    weights = {name: w.bfloat16() for name, w in layer().items()}
    layout = WeightLayout(algorithm="sha256", tp_size=size, plain=True)
    stream = StreamDigests([layout], KV_HEADS)
    list(stream.watch(quantize_stream(weights.items(), Quantization("fp8"))))
    for rank in range(size):
        held = dict[str, Tensor]()
        for name, tensor in on_server(weights, rank, size).items():
            if ".experts." in name:
                parts = [fp8_blocks(expert.bfloat16()) for expert in tensor]
                held[name], held[f"{name}_scale_inv"] = (torch.stack(part) for part in zip(*parts, strict=True))
            elif name.endswith("_proj.weight"):
                held[name], held[f"{name}_scale_inv"] = fp8_blocks(tensor)
            else:
                held[name] = tensor.bfloat16()
        digests = stream.expected(layout, rank)
        assert digests.keys() == held.keys()
        assert not [name for name, tensor in held.items() if digests[name].digest != sha(tensor)]


def test_reordered_int4_experts_must_change() -> None:
    layout = WeightLayout(algorithm="sha256", tp_size=1, plain=True)
    name, record = "model.layers.0.mlp.experts.w13_weight_packed", ServerRecord()

    def judge(seed: int, packed: str) -> Proof:
        torch.manual_seed(seed)
        stream = StreamDigests([layout], KV_HEADS)
        expert = "model.layers.0.mlp.experts.0"
        made = {f"{expert}.{part}_proj.weight": torch.randn(16, 32) for part in ("gate", "up")}
        list(stream.watch(quantize_stream(made.items(), Quantization("int4"))))
        digests = stream.expected(layout, 0)
        assert digests.keys() == {name, name.replace("packed", "scale")}
        sums = dict.fromkeys(digests, packed.ljust(64, "0"))
        return record.verify(layout, [RankDigests(tp_rank=0, digests=sums)], {0: digests})

    assert len(judge(0, "a").changed) == 2 and len(judge(1, "b").changed) == 2
    assert len(judge(2, "b").wrong) == 2


def test_no_digest_is_predicted_for_incomplete_unsplittable_or_quantized_tensors() -> None:
    weights = layer()
    del weights["model.layers.0.self_attn.k_proj.weight"], weights["model.layers.0.mlp.experts.1.up_proj.weight"]
    layouts = [WeightLayout(algorithm="sha256", tp_size=n, plain=True) for n in (1, 3)]
    stream = StreamDigests(layouts, KV_HEADS)
    list(stream.watch(weights.items()))
    digests = stream.expected(layouts[0], 0)
    assert "model.layers.0.self_attn.qkv_proj.weight" not in digests
    assert "model.layers.0.mlp.experts.w13_weight" not in digests and "model.layers.0.mlp.experts.w2_weight" in digests
    assert stream.expected(layouts[1], 0).keys() <= {
        *("model.norm.weight", "model.layers.0.mlp.gate.weight", "model.embed_tokens.weight", "lm_head.weight")
    }
    # Three ranks have 64 rows each.
    padded = torch.cat([weights["lm_head.weight"], torch.zeros(192 - VOCAB, HIDDEN)])
    for rank, rows in enumerate(padded.split(64)):
        assert stream.expected(layouts[1], rank)["lm_head.weight"].digest == sha(rows)
    assert not stream.expected(WeightLayout(algorithm="sha256", tp_size=1, plain=False), 0)


def test_a_tensor_packed_after_loading_is_proved_by_loaded_bytes_and_by_change() -> None:
    layout = WeightLayout(algorithm="sha256", tp_size=1, plain=True, complete=True)
    name, record = "model.layers.0.self_attn.o_proj.weight", ServerRecord()

    def judge(weight: Tensor, loaded: Tensor, packed: str) -> list[str]:
        stream = StreamDigests([layout], KV_HEADS)
        stream.add(name, weight)
        sums = RankDigests(tp_rank=0, digests={name: packed.ljust(64, "0")}, loaded={name: sha(loaded)})
        return record.verify(layout, [sums], {0: stream.expected(layout, 0)}).wrong

    old, new, other = torch.randn(3, 4, 4)
    assert not judge(old, old, "a") and not judge(new, new, "b")
    assert judge(other, other, "b") == [name]  # loaded, and never packed
    assert judge(other, new, "c") == [name]
    assert not judge(other, other, "c")


def test_a_tied_output_layer_without_a_name_is_proved_by_its_loaded_bytes() -> None:
    layout = WeightLayout(algorithm="sha256", tp_size=1, plain=True, complete=True)
    embedding, head, record = "model.embed_tokens.weight", "lm_head.weight", ServerRecord()
    for _ in range(3):
        weight = torch.randn(64, HIDDEN)
        stream = StreamDigests([layout], KV_HEADS)
        list(stream.watch((name, weight) for name in (embedding, head)))
        sums = RankDigests(tp_rank=0, digests={embedding: sha(weight)}, loaded={head: sha(weight)})
        proof = record.verify(layout, [sums], {0: stream.expected(layout, 0)})
        assert not proof.wrong and sorted(proof.as_sent) == [head, embedding]


def test_a_server_that_reports_loaded_digests_must_match_exactly() -> None:
    names = [f"model.layers.{i}.self_attn.o_proj.weight" for i in range(2)]
    for complete in (False, True):
        layout = WeightLayout(algorithm="sha256", tp_size=1, plain=True, complete=complete)
        stream, record = StreamDigests([layout], KV_HEADS), ServerRecord()
        list(stream.watch((name, torch.randn(4, 4)) for name in names))
        record.begin([RankDigests(tp_rank=0, digests=dict.fromkeys(names, "a" * 64))])
        after = RankDigests(tp_rank=0, digests=dict.fromkeys(names, "b" * 64))
        proof = record.verify(layout, [after], {0: stream.expected(layout, 0)})
        assert (proof.wrong if complete else proof.changed) == names


def test_fusions_of_other_families_are_predicted_as_servers_form_them() -> None:
    """By the tables of vLLM 0.32 and SGLang 0.5.23: ``stacked_params_mapping`` and ``orig_to_new_stacked``."""
    mixtral, linear, latent = "model.layers.0.block_sparse_moe.experts", "model.layers.0.linear_attn", "model.layers.1"
    down = f"{latent}.self_attn"
    w = {f"{mixtral}.{i}.{part}.weight": torch.randn(INTER, HIDDEN) for i in (1, 0) for part in ("w1", "w3")}
    w |= {f"{mixtral}.{i}.w2.weight": torch.randn(HIDDEN, INTER) for i in (0, 1)}
    w |= {f"{linear}.in_proj_{part}.weight": torch.randn(n, HIDDEN) for part, n in dict(a=3, b=3, z=5, qkv=7).items()}
    w |= {f"{down}.{part}.weight": torch.randn(6, HIDDEN) for part in ("kv_a_proj_with_mqa", "q_a_proj")}

    def cat(prefix: str, *parts: str) -> Tensor:
        return torch.cat([w[f"{prefix}{part}.weight"] for part in parts])

    held = {
        f"{mixtral}.w13_weight": torch.stack([cat(f"{mixtral}.{i}.", "w1", "w3") for i in (0, 1)]),
        f"{mixtral}.w2_weight": torch.stack([w[f"{mixtral}.{i}.w2.weight"] for i in (0, 1)]),
        f"{linear}.in_proj_qkvz.weight": cat(f"{linear}.in_proj_", "qkv", "z"),
        f"{linear}.in_proj_ba.weight": cat(f"{linear}.in_proj_", "b", "a"),
        f"{down}.fused_qkv_a_proj.weight": cat(f"{down}.", "q_a_proj", "kv_a_proj_with_mqa"),
    }
    one, two = (WeightLayout(algorithm="sha256", tp_size=size, plain=True) for size in (1, 2))
    stream = StreamDigests([one, two], KV_HEADS)
    assert dict(stream.watch(w.items())).keys() == w.keys()
    assert {name: e.digest for name, e in stream.expected(one, 0).items()} == {n: sha(t) for n, t in held.items()}
    assert stream.predicts_all(one)
    # Each rank has a part of each of q, k, v and z, which a tensor of all three does not show.
    assert stream.expected(two, 0).keys() == held.keys() - {n for n in held if "in_proj" in n}
    assert not stream.predicts_all(two)


def test_decay_rates_of_linear_attention_are_held_in_fp32() -> None:
    layout = WeightLayout(algorithm="sha256", tp_size=1, plain=True)
    stream = StreamDigests([layout], KV_HEADS)
    sent = {f"model.layers.0.linear_attn.{name}": torch.randn(6).bfloat16() for name in ("A_log", "dt_bias")}
    for name, tensor in sent.items():
        stream.add(name, tensor)
    digests = {name: e.digest for name, e in stream.expected(layout, 0).items()}
    held = {"A_log": torch.float32, "dt_bias": torch.bfloat16}
    assert digests == {name: sha(t.to(held[name.rpartition(".")[2]])) for name, t in sent.items()}

"""Upcycled folders compute what their dense models compute, and a dense model without an exact mixture is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from megatron_dppo.commands.main import main
from megatron_dppo.errors import CheckpointError, ConfigError, DiskError
from megatron_dppo.hf.families import get_family
from megatron_dppo.hf.folder import build_hf_model, model_shape, read_hf_config
from megatron_dppo.hf.weight_files import FolderWeights
from megatron_dppo_convert import upcycling
from megatron_dppo_convert.upcycled_config import TARGETS, Upcycling
from megatron_dppo_convert.upcycling import upcycle_folder

ROOT = Path(__file__).parents[3]
TOKENIZER = ROOT / "examples/chain_sum/model"
SIZES: dict[str, Any] = dict(
    vocab_size=117,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.08,
    max_position_embeddings=300,
    rms_norm_eps=3e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 2e4},
    bos_token_id=3,
    eos_token_id=[4, 5],
    pad_token_id=6,
)
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": False}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": None, "tie_word_embeddings": False}),
    "qwen2": ("qwen2", {"tie_word_embeddings": False}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True, "head_dim": 24}),
}
EXACT = Upcycling(num_experts=4, top_k=2, noise=0.0)


def dense_folder(folder: Path, name: str, **changes: Any) -> Path:
    """Save a random model in float32 whose biases and norms are random too."""
    family, own = DENSE[name]
    model = build_hf_model(AutoConfig.for_model(family, **SIZES | own | changes), torch.float32, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(("bias", "norm.weight")):
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: w for file in folder.glob("*.safetensors") for name, w in load_file(file).items()}


def logits(folder: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    tokens = torch.randint(0, SIZES["vocab_size"], (2, 40), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        result: Tensor = model(tokens).logits
    return result


@pytest.mark.parametrize("name", DENSE)
def test_without_noise_the_logits_are_those_of_the_dense_model(name: str, tmp_path: Path) -> None:
    dense = dense_folder(tmp_path / "dense", name)
    expected = logits(dense)
    assert expected.std() > 0.3, "a difference would show"
    for experts, top_k in ((4, 2), (3, 1), (3, 3)):
        out = tmp_path / f"{experts}-{top_k}"
        model = upcycle_folder(dense, out, Upcycling(num_experts=experts, top_k=top_k, noise=0.0))
        assert (logits(out) - expected).abs().max() < 1e-5
        config = read_hf_config(out)
        shape = model_shape(config)
        assert (shape.family, shape.num_experts, shape.dense_layers) == (TARGETS[DENSE[name][0]], experts, ())
        get_family(config).fields(config, shape)
        assert get_family(config).rope(config).theta == 2e4
        weights = stored(out)
        assert model.parameters_after == sum(w.numel() for w in weights.values())
        assert model.parameters_before == sum(w.numel() for w in stored(dense).values())
        assert ("lm_head.weight" in weights) == ("lm_head.weight" in stored(dense))


def test_the_configuration_and_all_other_files_are_carried_over(tmp_path: Path) -> None:
    dense = dense_folder(tmp_path / "dense", "llama")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TOKENIZER / file, dense / file)
    (dense / "chat_template.jinja").write_text("{{ messages }}")
    (dense / "generation_config.json").write_text('{"eos_token_id": [4, 5], "temperature": 0.6}')
    upcycle_folder(dense, tmp_path / "out", EXACT)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (dense / file).read_bytes()
    config, source = read_hf_config(tmp_path / "out"), read_hf_config(dense)
    for key in ("rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "vocab_size", "hidden_act", "dtype"):
        assert getattr(config, key) == getattr(source, key), key
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (3, [4, 5], 6)
    assert config.norm_topk_prob and config.architectures == ["Qwen2MoeForCausalLM"]


def test_a_tokenizer_that_declares_no_class_stays_the_same(tmp_path: Path) -> None:
    dense = dense_folder(tmp_path / "dense", "llama")
    shutil.copyfile(TOKENIZER / "tokenizer.json", dense / "tokenizer.json")
    upcycle_folder(dense, tmp_path / "out", EXACT)
    before, after = (AutoTokenizer.from_pretrained(folder) for folder in (dense, tmp_path / "out"))
    assert type(after) is type(before)
    assert after.backend_tokenizer.to_str() == before.backend_tokenizer.to_str()
    (dense / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer .*dense"):
        upcycle_folder(dense, tmp_path / "broken", EXACT)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_noise_has_the_requested_deviation_on_every_expert(name: str, tmp_path: Path) -> None:
    dense = dense_folder(tmp_path / "dense", name, intermediate_size=256)
    upcycle_folder(dense, tmp_path / "out", Upcycling(num_experts=3, top_k=2, noise=0.05))
    source, weights = stored(dense), stored(tmp_path / "out")
    noises = []
    for layer in range(3):
        for part in ("gate_proj", "up_proj", "down_proj"):
            original = source[f"model.layers.{layer}.mlp.{part}.weight"]
            for expert in range(3):
                weight = weights[f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight"]
                noises.append(((weight - original) / original.std()).flatten())
    correlations = torch.corrcoef(torch.stack(noises)) - torch.eye(27)
    assert all(abs(float(noise.std()) / 0.05 - 1) < 0.03 for noise in noises)
    assert correlations.abs().max() < 0.05, "every expert has noise of its own"
    unchanged = source.keys() & weights.keys()
    assert len(unchanged) == len(source) - 9
    assert all(torch.equal(source[key], weights[key]) for key in unchanged)
    routers = torch.stack([weights[f"model.layers.{layer}.mlp.gate.weight"] for layer in range(3)])
    assert routers.std().item() == pytest.approx(0.02, rel=0.1)


def test_the_shared_expert_is_zero_and_can_learn(tmp_path: Path) -> None:
    dense = dense_folder(tmp_path / "dense", "llama")
    upcycle_folder(dense, tmp_path / "out", EXACT)
    weights = stored(tmp_path / "out")
    prefix = "model.layers.0.mlp.shared_expert"
    assert weights[f"{prefix}.down_proj.weight"].shape == (64, 64)
    assert not weights[f"{prefix}.down_proj.weight"].any()
    assert not weights[f"{prefix}_gate.weight"].any()
    assert all(not w.any() for name, w in weights.items() if name.endswith("_proj.bias"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    model(torch.arange(20)[None]).logits.square().sum().backward()
    assert model.model.layers[0].mlp.shared_expert.down_proj.weight.grad.abs().min() > 0


def test_the_bits_depend_on_the_seed_and_not_on_files(tmp_path: Path) -> None:
    dense = dense_folder(tmp_path / "dense", "qwen2")
    parts = tmp_path / "parts"
    shutil.copytree(dense, parts)
    (parts / "model.safetensors").unlink()
    AutoModelForCausalLM.from_pretrained(dense).save_pretrained(parts, max_shard_size="40KB")
    assert len(list(parts.glob("*.safetensors"))) > 3
    settings = Upcycling(num_experts=4, top_k=2, noise=0.02, seed=7)
    upcycle_folder(dense, tmp_path / "first", settings)
    upcycle_folder(parts, tmp_path / "second", settings, max_shard_bytes=60_000)
    upcycle_folder(dense, tmp_path / "other", Upcycling(num_experts=4, top_k=2, noise=0.02, seed=8))
    assert len(list((tmp_path / "second").glob("*.safetensors"))) > 3
    first, second, other = (stored(tmp_path / name) for name in ("first", "second", "other"))
    assert first.keys() == second.keys() == other.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    seeded = {name for name in first if not torch.equal(first[name], other[name])}
    expected = {n for n in first if ".experts." in n or ".mlp.gate." in n or "shared_expert.gate_proj" in n}
    assert seeded == expected | {n for n in first if "shared_expert.up_proj" in n}


def test_every_tensor_keeps_its_dtype(tmp_path: Path) -> None:
    dense = dense_folder(tmp_path / "dense", "llama")
    mixed = {n: w if "norm" in n else w.bfloat16() for n, w in stored(dense).items()}
    save_file(mixed, dense / "model.safetensors", metadata={"format": "pt"})
    edit_config(dense, dtype="bfloat16")
    upcycle_folder(dense, tmp_path / "out", Upcycling(num_experts=2, top_k=1, noise=0.02))
    for name, weight in stored(tmp_path / "out").items():
        assert weight.dtype == (torch.float32 if "norm" in name else torch.bfloat16), name
    assert read_hf_config(tmp_path / "out").dtype == torch.bfloat16


REFUSED_CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    (
        "llama",
        {
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e5, "factor": 8.0, "low_freq_factor": 1.0}
            | {"high_freq_factor": 4.0, "original_max_position_embeddings": 128}
        },
        "rope_type = 'llama3'.*supported: 'default'.*Fix",
    ),
    ("qwen2", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_type = 'linear'"),
    ("llama", {"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type = 'dynamic'"),
    ("llama", {"attention_bias": True}, "attention_bias = True"),
    ("qwen3", {"attention_bias": True}, "attention_bias = True"),
    ("llama", {"mlp_bias": True}, "mlp_bias = True"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ("mistral", {"sliding_window": 4096}, "sliding_window = 4096"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 64}, "use_sliding_window = True"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    ("llama", {"head_dim": 32}, "head_dim = hidden_size / num_attention_heads = 16 .* got 32.*Fix"),
    ("qwen3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config = 'fp8'"),
    ("qwen3", {"model_type": "qwen3_moe"}, "llama, mistral, qwen2, qwen3 .* got 'qwen3_moe'.*Fix"),
    ("llama", {"model_type": "gpt2"}, "got 'gpt2'.*Fix"),
]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dense folders that tests copy."""
    folder = tmp_path_factory.mktemp("dense")
    for name in DENSE:
        dense_folder(folder / name, name)
    return folder


def assert_refused(dense: Path, error: str, kind: type[Exception] = CheckpointError) -> None:
    with pytest.raises(kind, match=error):
        upcycle_folder(dense, dense.parent / "out", EXACT)
    assert not list(dense.parent.glob("out*")), "nothing is written"


@pytest.mark.parametrize(("name", "changes", "error"), REFUSED_CONFIGS)
def test_a_configuration_without_an_exact_mixture_is_refused(
    name: str, changes: dict[str, Any], error: str, originals: Path, tmp_path: Path
) -> None:
    dense = tmp_path / "dense"
    shutil.copytree(originals / name, dense)
    edit_config(dense, **changes)
    assert_refused(dense, error)


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"num_experts": 1, "top_k": 1}, "--experts of at least 2"),
        ({"top_k": 0}, r"1 to --experts \(4\), got 0.*Fix"),
        ({"top_k": 5}, r"1 to --experts \(4\), got 5.*Fix"),
        ({"noise": -0.1}, "--noise of 0 or a positive"),
        ({"noise": float("nan")}, "--noise .* got nan"),
        ({"noise": float("inf")}, "--noise .* got inf"),
    ],
)
def test_settings_outside_their_range_are_refused(values: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        Upcycling(**{"num_experts": 4, "top_k": 2, "noise": 0.0} | values)


def test_weights_that_are_not_those_of_the_configuration_are_refused(originals: Path, tmp_path: Path) -> None:
    key = "model.layers.1.mlp.up_proj.weight"
    changes: list[tuple[str, dict[str, Tensor | None], str]] = [
        ("llama", {key: None}, rf"30 weights .* got 1 fewer; missing: {key}.*Fix"),
        ("llama", {"lm_head.weight": None}, "missing: lm_head.weight"),
        ("llama", {key: torch.zeros(95, 64)}, rf"{key} with shape \(96, 64\) .* got \(95, 64\) in F32.*Fix"),
        ("llama", {key: torch.zeros(96, 64, dtype=torch.int8)}, r"got \(96, 64\) in I8.*Fix"),
        ("llama", {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}, r"only weights .*q_proj\.bias.*Fix"),
        ("llama tied", {"lm_head.weight": torch.zeros(117, 64)}, "lm_head.weight to equal .* tie_word_embeddings.*Fix"),
    ]
    for number, (name, change, error) in enumerate(changes):
        dense = tmp_path / str(number) / "dense"
        shutil.copytree(originals / name, dense)
        weights = {n: w for n, w in {**stored(dense), **change}.items() if w is not None}
        save_file(weights, dense / "model.safetensors", metadata={"format": "pt"})
        assert_refused(dense, error)


def test_files_that_transformers_does_not_read_are_left_out(originals: Path, tmp_path: Path) -> None:
    dense = tmp_path / "dense"
    shutil.copytree(originals / "llama tied", dense)
    weights = stored(dense)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    (dense / "model.safetensors").unlink()
    save_file(weights, dense / "model-00001-of-00001.safetensors", metadata={"format": "pt"})
    index = {"weight_map": dict.fromkeys(weights, "model-00001-of-00001.safetensors")}
    (dense / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"tok_embeddings.weight": torch.ones(2)}, dense / "consolidated.safetensors")  # as Mistral's folders
    upcycle_folder(dense, tmp_path / "out", EXACT)
    assert (logits(tmp_path / "out") - logits(originals / "llama tied")).abs().max() < 1e-5
    names = FolderWeights(tmp_path / "out").names()
    assert not names & {"lm_head.weight", "tok_embeddings.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"}


def test_folders_that_cannot_be_read_or_written_are_refused(
    originals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = tmp_path / "dense"
    shutil.copytree(originals / "llama", dense)
    (tmp_path / "there").mkdir()
    with pytest.raises(CheckpointError, match="a new folder"):
        upcycle_folder(dense, tmp_path / "there", EXACT)
    assert_refused(tmp_path / "nowhere", "config.json is missing")
    monkeypatch.setattr("megatron_dppo.files.free_bytes", lambda path: 1000)
    assert_refused(dense, "the mixture of experts needs about .* 1.0 kB free", DiskError)
    monkeypatch.undo()
    (dense / "model.safetensors.index.json").write_text("{}")
    assert_refused(dense, "Expected JSON with 'weight_map' in .*index.json.*Fix")
    (dense / "model.safetensors.index.json").unlink()
    (dense / "model.safetensors").rename(dense / "pytorch_model.bin")
    assert_refused(dense, r"has no \*.safetensors weights \(its pytorch_model")


def test_a_failure_on_the_way_leaves_no_folder(
    originals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = upcycling.new_weight

    def fail_late(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
        if "layers.2." in name:
            raise OSError(28, "No space left on device")
        return make(name, shape, seed)

    monkeypatch.setattr(upcycling, "new_weight", fail_late)
    with pytest.raises(DiskError, match="disk is full"):
        upcycle_folder(originals / "llama", tmp_path / "out", EXACT)
    assert not (tmp_path / "out").exists()


def test_the_command_prints_parameters_and_the_folder(
    originals: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(originals / "qwen3"), str(tmp_path / "out"), "--experts", "4", "--noise", "0.02"]
    for top_k, code in (("5", 2), ("1", 0)):
        assert main(["convert", "upcycle", *arguments, "--top-k", top_k]) == code
    printed = capsys.readouterr()
    assert "Expected --top-k from 1 to --experts (4), got 5" in printed.err
    before = sum(w.numel() for w in stored(originals / "qwen3").values())
    after = sum(w.numel() for w in stored(tmp_path / "out").values())
    assert f"parameters: {before:,} before, {after:,} after" in printed.out
    assert f"wrote {tmp_path / 'out'} (qwen3_moe, 4 experts, top-k 1)" in printed.out
    assert "note: with top-k 1" in printed.out

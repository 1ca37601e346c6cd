"""Runs whose servers get only adapters: they add them to the base model, and prove it before anything is sampled."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from megatron_dppo.config.io import load_config
from megatron_dppo_engines.serving.checks import ServerRequirements, find_server_problems
from tests.e2e.runs import CONFIG, flags, step_records, train
from tests.engines.calls import SHORT, ask, call
from tests.engines.family_models import FamilyModel
from tests.engines.proxy import Before, Exchange, Proxy
from tests.engines.runs import arguments
from tests.engines.servers import TOOLS, Engine, free_port, start_server, stop_engine, wait_ready
from tests.engines.tiny import SPECIAL, byte_tokenizer, make_tiny
from tests.unit.configs import server_plans

VERSIONS = {"sglang": "0.5.23", "vllm": "0.32.0"}
ATTENTION = '["q_proj", "k_proj", "v_proj", "o_proj"]'
STEPS = 3
ADAPTED: Mapping[str, tuple[str, ...]] = {
    "sglang": ("qwen3_moe", "llama", "mistral", "mixtral"),
    "vllm": ("qwen3", "llama", "mistral"),
}
"""Families whose adapters on attention an engine adds on a CPU. The first of each has the tests that CI takes."""
FAMILIES = [
    pytest.param(engine, name, id=f"{engine}-{name}", marks=pytest.mark.long)
    for engine in ADAPTED
    for name in ADAPTED[engine][1:]
]


def settings(engine: str, model: Path, **more: Any) -> dict[str, Any]:
    """Return the settings of a run with adapters on attention; no engine supports expert adapters on a CPU."""
    values = {
        "model__path": model,
        "lora__rank": 4,
        "lora__target_modules": ATTENTION,
        "rollout__engine": engine,
        "rollout__dtype": "fp32",
        "rollout__temperature": 0.7,
        "rollout__weight_sync__method": "adapter",
        "rollout__weight_sync__attempts": 1,
        "optimizer__lr_decay_style": "constant",
        "optimizer__lr_warmup_steps": 0,
        "train__mini_batches": 1,
        "train__router_replay": "off",
        "rollout__prompts_per_step": 4,
        "rollout__samples_per_prompt": 4,
        "run__num_steps": STEPS,
    }
    return values | more


def served(engine: str, model: Path, folder: Path) -> Iterator[Engine]:
    """A server with the flags that ``megatron-dppo serve`` gives it."""
    command = [str(TOOLS / f"{engine}.sh"), "serve", VERSIONS[engine]]
    port = free_port()
    where = {"rollout__servers__command": json.dumps(command), "rollout__servers__port": port}
    config = load_config(CONFIG, flags(**settings(engine, model, run__output_dir=folder, **where)))
    plan = server_plans(config, {})[0]
    sizes = ("--context-length", "2048") if engine == "sglang" else ("--max-model-len", "2048", "--max-num-seqs", "32")
    backend = ("--lora-backend", "torch_native", "--nccl-port", str(free_port())) if engine == "sglang" else ()
    env = {key: value for key, value in plan.env.items() if key != "PYTHONPATH"}  # the script has its own
    argv = [*plan.argv[len(command) :], *sizes, *backend]
    running = start_server(engine, VERSIONS[engine], argv, port, folder / "log", env)
    try:
        yield wait_ready(running)
    finally:
        stop_engine(running)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "moe", seed=3)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "dense"
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False}
    torch.manual_seed(4)
    Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, **tokens, initializer_range=0.1)).save_pretrained(folder)
    byte_tokenizer(SPECIAL).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sglang(moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    yield from served("sglang", moe, tmp_path_factory.mktemp("sglang"))


@pytest.fixture(scope="module")
def vllm(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    yield from served("vllm", dense, tmp_path_factory.mktemp("vllm"))


@torch.no_grad()
def apart(folder: Path, engine: Engine, *, adapter: bool) -> float:
    """The largest difference of a response's log-probabilities from those of a Hugging Face folder."""
    result = call(engine, lambda server: server.generate(ask(SHORT, 16, temperature=0.7)), adapter=adapter)
    tokens = result.token_ids.tolist()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits = model(torch.tensor([[*SHORT, *tokens]])).logits[0, len(SHORT) - 1 : -1] / 0.7
    return float((logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0] - result.logprobs).abs().max())


def run_with(engine: Engine | Proxy, model: Path, folder: Path, processes: int = 1, **more: Any) -> tuple[int, str]:
    """Exit code and output."""
    kind = engine.kind if isinstance(engine, Engine) else "sglang"
    result = train(arguments([engine], folder, **settings(kind, model, **more)), processes=processes)
    return result.returncode, result.stdout + result.stderr


def write_reward(folder: Path) -> Path:
    """One that a model which knows nothing gets, too."""
    (folder / "rewards.py").write_text(
        "def reward(*, prompt, completion, label, metadata):\n    return float(len(completion) % 7)\n"
    )
    return folder / "rewards.py"


def check_flags(engine: Engine) -> None:
    """Check the adapter flags that preflight reads from a server."""

    def problems(rank: int) -> list[str]:
        needs = ServerRequirements(
            engine=engine.kind,  # type: ignore[arg-type]
            context=100,
            topk=0,
            routed_experts=False,
            weight_sync="adapter",
            adapter_rank=rank,
        )
        return find_server_problems(engine.url, needs, None)

    assert problems(4) == []
    (problem,) = problems(64)
    assert "lora.rank = 64; start it with --max-lora-rank 64" in problem


def check_run(engine: Engine, model: Path, folder: Path, processes: int) -> None:
    check_flags(engine)
    code, text = run_with(
        engine,
        model,
        folder,
        processes,
        parallel__expert_model_parallel_size=processes,
        optimizer__lr=0.01,
        reward__function=f"{write_reward(folder.parent)}:reward",
    )
    assert code == 0, text
    steps = step_records(folder)
    errors = [step["train/abs_prob_diff_first"] for step in steps]
    assert len(errors) == STEPS and max(errors) < 1e-5
    sent = sorted((folder / "weights").glob("version_*"))[-1]
    assert sent.name == f"version_{STEPS:06d}"
    size = sum(file.stat().st_size for file in sent.iterdir())
    assert size < 0.3 * (model / "model.safetensors").stat().st_size
    trained = apart(folder / "hf", engine, adapter=True)
    # docs/lora.md has these figures (pytest -rP).
    print(engine.kind, model.parent.name, f"steps {max(errors):.1e} policy {trained:.1e}")
    assert trained < 1e-4, "the server samples from the trained policy"
    assert apart(model, engine, adapter=False) < 1e-4 < 0.01 < apart(model, engine, adapter=True)


def test_sglang_samples_from_base_and_adapter(sglang: Engine, moe: Path, tmp_path: Path) -> None:
    check_run(sglang, moe, tmp_path / "run", processes=2)


def test_vllm_samples_from_base_and_adapter(vllm: Engine, dense: Path, tmp_path: Path) -> None:
    check_run(vllm, dense, tmp_path / "run", processes=1)


@pytest.mark.parametrize(("engine_name", "name"), FAMILIES)
def test_servers_of_other_families_sample_from_base_and_adapter(engine_name: str, name: str, tmp_path: Path) -> None:
    model = FamilyModel(name, tmp_path / "model", seed=3).folder
    (tmp_path / "server").mkdir()
    with contextlib.contextmanager(served)(engine_name, model, tmp_path / "server") as engine:
        check_run(engine, model, tmp_path / "run", processes=1)


async def without_adapter(exchange: Exchange) -> bool:
    """As a server that knows the adapter and does not add it."""
    if exchange.path == "/generate":
        exchange.request.pop("lora_path", None)
    return True


async def without_one_target(exchange: Exchange) -> bool:
    """As one that adds nothing to one of the projections."""
    if exchange.path == "/load_lora_adapter":
        file = Path(exchange.request["lora_path"]) / "adapter_model.safetensors"
        save_file({name: value * ("k_proj.lora_B" not in name) for name, value in load_file(file).items()}, file)
    return True


@pytest.mark.parametrize("change", [without_adapter, without_one_target])
def test_a_server_that_ignores_adapters_is_rejected_before_it_samples(
    change: Before, sglang: Engine, moe: Path, tmp_path: Path
) -> None:
    with Proxy(sglang.url, before=change) as proxy:
        code, text = run_with(proxy, moe, tmp_path / "run", parallel__expert_model_parallel_size=1)
    assert code == 2 and "does not add the adapters as the trainer does" in text and "wrong weights" in text, text


def test_a_server_with_another_base_model_is_rejected(sglang: Engine, tmp_path: Path) -> None:
    other = make_tiny(tmp_path / "other", seed=8)
    code, text = run_with(sglang, other, tmp_path / "run", parallel__expert_model_parallel_size=1)
    assert code == 2 and "cannot be shown that it was started with the base model" in text, text
    assert "by the server's own checksum of its weights" in text

"""A run of another family than Qwen from folder to folder: sampled, replayed, trained, saved, resumed, exported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from megatron_dppo.data.chat import load_tokenizer
from megatron_dppo.hf.folder import build_hf_model, copy_into_model, read_hf_config, stream_model
from megatron_dppo.hf.weight_files import FolderWeights
from tests.distributed.families import family_config
from tests.e2e.runs import CONFIG, flags, step_records, train

pytestmark = pytest.mark.e2e

MODEL = CONFIG.parent / "model"
REWARD = """
def score(*, prompt, completion, label, metadata):
    return float(sum(map(ord, completion)) % 7)
"""


def folder_of(family: str, target: Path) -> Path:
    """A tiny model of the family with the tokenizer of the embedded task, and biases of routers that matter."""
    tokenizer = load_tokenizer(str(MODEL))
    hf_config = family_config(family)
    hf_config.vocab_size, hf_config.max_position_embeddings = len(tokenizer), 256
    hf_config.eos_token_id = tokenizer.eos_token_id
    model = build_hf_model(hf_config, torch.float32, seed=0)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.3, generator=torch.Generator().manual_seed(3))
    model.save_pretrained(target)
    for file in MODEL.glob("tokenizer*"):
        shutil.copy(file, target)
    return target


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("deepseek_v3", {"parallel__expert_model_parallel_size": 2}),
        pytest.param("glm4_moe", {"parallel__pipeline_model_parallel_size": 2}, marks=pytest.mark.long),
        pytest.param("llama", {"parallel__tensor_model_parallel_size": 2}, marks=pytest.mark.long),
    ],
)
def test_a_run_of_a_family(family: str, layout: dict[str, int], tmp_path: Path) -> None:
    source = folder_of(family, tmp_path / "model")
    replay = {} if family == "llama" else {"train__router_replay": "rollout", "train__router_replay_weights": "true"}
    run = flags(
        run__output_dir=tmp_path / "run",
        model__path=source,
        parallel__expert_model_parallel_size=1,
        rollout__prompts_per_step=4,
        rollout__samples_per_prompt=4,
        rollout__max_new_tokens=12,
        rollout__dtype="fp32",
        reward__function=f"{tmp_path}/lengths.py:score",
        checkpoint__export_hf="true",
        log__curves="false",
        checkpoint__accept_changes="true",  # the number of steps
        **replay,
    )
    (tmp_path / "lengths.py").write_text(REWARD)
    run += flags(**layout)
    for steps in (1, 2):  # the second start resumes
        done = train([*run, *flags(run__num_steps=steps)], processes=2)
        assert done.returncode == 0, done.stdout + done.stderr
    records = step_records(tmp_path / "run")
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        assert record["train/abs_prob_diff_first"] < 1e-6 < 1e-3 < record["train/grad_norm"]
        assert not replay or record["train/router_disagreement"] == 0
    exported, before = FolderWeights(tmp_path / "run/hf"), FolderWeights(source)
    assert exported.names() == before.names()
    moved = {name for name in before.names() if not torch.equal(exported[name], before[name])}
    biases = {name for name in before.names() if name.endswith("e_score_correction_bias")}
    visited = {name for name in before.names() - biases if ".experts." not in name}  # an expert may have had no token
    assert visited <= moved and not moved & biases
    second = build_hf_model(read_hf_config(tmp_path / "run/hf"), torch.float32)
    copy_into_model(second, exported.stream(tied=False))
    assert {name for name, _ in stream_model(second)} == before.names()
    assert json.loads((tmp_path / "run/hf/config.json").read_text())["model_type"] == family

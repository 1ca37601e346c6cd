from __future__ import annotations

import random
import re
import zlib
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.data.chat import load_tokenizer
from megatron_dppo.hf.families import get_family
from megatron_dppo.hf.folder import build_hf_model, read_hf_config
from megatron_dppo.rewards import math_reward
from megatron_dppo_lab.embedded_tasks import demonstration, problems, write_model_folder

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples/chain_sum/model"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(FOLDER)


def test_all_2916_problems_are_in_exactly_one_split() -> None:
    train, held_out = ({p.question for p in problems(split)} for split in ("train", "eval"))
    assert len(train) + len(held_out) == len(train | held_out) == 2916
    assert all(re.fullmatch(r"[1-9][+-][1-9][+-][1-9]=", question) for question in train | held_out)
    assert held_out == {q for q in train | held_out if zlib.crc32(q.encode()) % 10 == 0}


def test_answers_and_solutions_agree_with_python_arithmetic() -> None:
    for problem in [*problems("train"), *problems("eval")]:
        assert problem.answer == eval(problem.question[:-1])
        first, second = problem.work.split(",")
        for step in (first, second):
            left, right = step.split("=")
            assert eval(left) == int(right), step
        assert second.startswith(first.split("=")[1]) and second.endswith(f"={problem.answer}")


def test_demonstrations_are_40_percent_careful_and_otherwise_guesses_within_5() -> None:
    rng, every = random.Random(0), problems("train")
    careful, errors = 0, set()
    for _ in range(10_000):
        problem = rng.choice(every)
        text = demonstration(problem, rng)
        if text.startswith("\\boxed{"):
            errors.add(int(text[7:-1]) - problem.answer)
        else:
            careful += 1
            assert text == f"{problem.work} \\boxed{{{problem.answer}}}"
    assert 0.38 < careful / 10_000 < 0.42  # four standard deviations
    assert errors == set(range(-5, 6))


def test_demonstrations_depend_on_the_generator_alone() -> None:
    problem = problems("train")[0]
    first, second = ([demonstration(problem, rng) for _ in range(50)] for rng in (random.Random(3), random.Random(3)))
    assert first == second


def test_a_worked_answer_earns_the_reward_and_a_wrong_guess_does_not() -> None:
    problem = problems("eval")[0]
    for text, expected in (
        (f"{problem.work} \\boxed{{{problem.answer}}}", 1.0),
        (f"\\boxed{{{problem.answer + 1}}}", 0.0),
    ):
        assert math_reward(prompt="", completion=text, label=str(problem.answer), metadata={}) == expected


@pytest.mark.parametrize(("folder", "head_dim"), [(FOLDER, 16), (FOLDER.parent / "model_vllm", 32)])
def test_the_committed_folders_equal_the_output_of_the_tool(tmp_path: Path, folder: Path, head_dim: int) -> None:
    write_model_folder("chain_sum", tmp_path, head_dim)
    written = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert set(written) == {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    for name, content in written.items():
        assert content == (folder / name).read_bytes(), f"{name} differs: run tools/make_task_model.py"


def test_every_problem_and_demonstration_round_trips_through_the_tokenizer(tokenizer: Any) -> None:
    rng = random.Random(1)
    for problem in [*problems("train"), *problems("eval")]:
        for text in (problem.question, demonstration(problem, rng)):
            assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


def test_the_opening_of_a_box_is_one_token_and_bos_comes_first_only_on_request(tokenizer: Any) -> None:
    text = "7+8=15 \\boxed{15}"
    bare = tokenizer(text, add_special_tokens=False).input_ids
    assert len(bare) == len(text) - len("\\boxed{") + 1
    assert tokenizer(text).input_ids == [tokenizer.bos_token_id, *bare]
    assert tokenizer.decode([*tokenizer(text).input_ids, 2, 0], skip_special_tokens=True) == text
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)


def test_the_model_has_the_size_that_the_hyperparameters_were_found_for(tokenizer: Any) -> None:
    config = read_hf_config(FOLDER)
    assert config.vocab_size == len(tokenizer) == 53
    assert get_family(config).rope(config).theta == 10_000.0
    import torch

    model = build_hf_model(config, torch.float32, seed=0)
    assert sum(p.numel() for p in model.parameters()) == 225_984
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(0.1, rel=0.1)

"""Reading a configuration imports nothing that it names, in this process and in those that get it pickled."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from megatron_dppo.config.io import load_config
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import ConfigError, FunctionError
from megatron_dppo.setup.named_functions import named_functions, require_permission
from megatron_dppo_plan.command import without_functions

CODE = """
import pathlib
pathlib.Path(__file__).with_name("executed").touch()
from megatron_dppo.losses import needs, Loss

@needs(topk=True, reference=True)
def function(*args, **options):
    return 0.0

class Mine(Loss):
    name: str = "mine"
    sharpness: float = 1.0
"""
EXAMPLE: dict[str, dict[str, Any]] = {
    "run": {"output_dir": "out", "num_steps": 1},
    "model": {"path": "."},
    "data": {"train": "task:chain_sum"},
    "rollout": {"prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 8},
    "optimizer": {"lr": 1e-3},
}


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "code.py").write_text(CODE)
    return tmp_path / "code.py"


def write(folder: Path, **sections: dict[str, Any]) -> Path:
    values = {name: {**EXAMPLE.get(name, {}), **sections.get(name, {})} for name in {*EXAMPLE, *sections}}
    file = folder / "config.toml"
    file.write_text(tomli_w.dumps(values))
    return file


def everything(code: Path, name: str = "function", **loss: Any) -> dict[str, dict[str, Any]]:
    function = f"{code}:function"
    return {
        "loss": {"name": f"{code}:{name}", "mask": function, **loss},
        "train": {"advantage": function, "advantage_options": {"x": 1}},
        "reward": {"function": function},
        "rollout": {"generate": function},
    }


def test_nothing_is_executed_and_declared_needs_are_known(code: Path) -> None:
    """The file leaves a trace when it is imported; the needs are read from its decorator."""
    config = load_config(write(code.parent, **everything(code)))
    again = pickle.loads(pickle.dumps(config))
    for each in (config, again, config.model_copy(update={"run": config.run}), Config.model_validate(config)):
        assert each.loss.has_text and each.loss.is_topk and each.needs_reference and each.topk_logprobs == 20
        with pytest.raises(FunctionError, match="was not imported"):
            each.loss.user_mask.function()
        assert each.model_dump(mode="json") == config.model_dump(mode="json")
    assert not (code.parent / "executed").exists()
    named = set(named_functions(config))
    assert named == {"loss.name", "loss.mask", "train.advantage", "reward.function", "rollout.generate"}


def test_keys_of_a_class_that_is_not_imported_are_kept(code: Path) -> None:
    config = load_config(
        write(code.parent, loss={"name": f"{code}:Mine", "sharpness": 2.0, "topk": 7, "form": "ratio"})
    )
    assert config.model_dump()["loss"]["sharpness"] == 2.0
    assert pickle.loads(pickle.dumps(config)).model_dump() == config.model_dump()
    assert not (code.parent / "executed").exists()


def test_training_imports_them_and_finds_what_is_wrong(code: Path) -> None:
    with pytest.raises(ConfigError, match="has no 'absent'"):
        load_config(write(code.parent, loss={"name": f"{code}:absent"}), with_functions=True)
    assert (code.parent / "executed").exists()
    assert load_config(write(code.parent, loss={"name": f"{code}:absent"})).loss.has_text


def test_a_built_in_loss_is_complete_either_way(tmp_path: Path) -> None:
    file = write(tmp_path, loss={"name": "grpo"})
    assert load_config(file) == load_config(file, with_functions=True)
    assert not load_config(file).loss.has_text
    with pytest.raises(ConfigError, match="topk = 7"):
        load_config(write(tmp_path, loss={"name": "grpo", "topk": 7}))


def test_a_plan_rehearses_a_built_in_loss_with_the_declared_needs(
    code: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = without_functions(load_config(write(code.parent, **everything(code, topk=7, entropy_coef=0.1))))
    assert (config.loss.name, config.loss.topk, config.loss.entropy_coef) == ("dppo_topk_tv", 7, 0.1)
    assert not config.loss.has_text and capsys.readouterr().out.count("code.py:function") == 1
    plain = load_config(write(code.parent, loss={"name": "grpo"}))
    assert without_functions(plain) is plain
    assert not (code.parent / "executed").exists()


def test_permission_names_what_is_needed(code: Path) -> None:
    config = load_config(write(code.parent, **everything(code)))
    with pytest.raises(ConfigError, match=r"eval needs rollout.generate = .* and reward.function = .*--run-functions"):
        require_permission(config, ("rollout", "reward"), "eval", is_given=False)
    require_permission(config, ("rollout", "reward"), "eval", is_given=True)
    require_permission(config, ("agent",), "eval", is_given=False)
    agent = load_config(write(code.parent, agent={"command": ["python", "agent.py"]}, model={"path": "."}))
    with pytest.raises(ConfigError, match=r"agent.command = 'python agent.py'"):
        require_permission(agent, ("agent",), "eval", is_given=False)

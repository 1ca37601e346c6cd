"""No number of the configuration is accepted whatever it is: extremes of every key are refused by its name."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from megatron_dppo.commands.main import main
from megatron_dppo.config.io import read_config
from megatron_dppo.config.plausible import check_plausible
from megatron_dppo.config.schema import Config

EXAMPLE = Path(__file__).parents[3] / "examples/chain_sum/dppo.toml"
ABSURD = {
    float: ("1e-30", "1e30", "-1e30", "1e308", "nan", "inf", "-inf"),
    int: ("99999999999999999999", "-99999999999999999999", "2000000000", "1e30", "0.5", "nan"),
}


def numbers(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type]]:
    """Yield each key that holds a number, and the number's type."""
    for name, field in section.model_fields.items():
        kinds = list(parts(field.annotation))
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                if name != "functions":
                    yield from numbers(kind, f"{prefix}{name}.")
            elif kind in ABSURD:
                yield prefix + name, kind


def parts(annotation: Any) -> Iterator[Any]:
    yield annotation
    for part in typing.get_args(annotation):
        yield from parts(part)


NUMBERS = sorted(set(numbers(Config)), key=str)
MORE = [("loss.ratio_cap", float), ("loss.divergence_threshold_low", float)] + [
    ("model.transformer." + name, float) for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff", "hidden_dropout")
]
SEEDS = {"run.seed": ("2000000000",), "optimizer.adam_eps": ("1e-30",)}
"""Values that are no absurd ones for these keys."""


def test_every_number_has_a_plausible_range() -> None:
    assert len(NUMBERS) > 100
    accepted = []
    for key, kind in [*NUMBERS, *MORE]:
        for text in ABSURD[kind]:
            problems = "\n".join(read_config(EXAMPLE, [f"--{key}", text]).problems)
            named = all(part in problems for part in key.rsplit(".", 1))
            if not named and text not in SEEDS.get(key, ()):
                accepted.append((key, text))
    assert not accepted


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", 0.01),
        ("temperature", 1.5),
        ("lr", 1e-9),
        ("lr", 0.05),
        ("timeout_seconds", 0.05),
        ("timeout_seconds", 7 * 24 * 3600.0),
        ("adam_eps", 1e-15),
        ("threads_per_rank", 256),
        ("max_new_tokens", 131_072),
        ("weight", -2.0),
        ("kl_coef", 1e-6),
        ("initial_loss_scale", 2.0**32),
        ("divergence_threshold_low", 1e-6),
        ("seed", 2**63 - 1),
        ("anything", True),
        ("anything", 0),
        ("system_prompt", "two\nlines"),
        ("label_key", ""),
    ],
)
def test_values_that_runs_have_are_accepted(key: str, value: Any) -> None:
    check_plausible(key, value)


@pytest.mark.parametrize("value", ["", "  ", "a\0b", "a\nb", "a/" + 256 * "x", 86 * "字"])
def test_a_text_that_can_be_no_path_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="path"):
        check_plausible("path", value)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE = 'abc' in the environment; expected a whole number of at least 1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE = '0'"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE = ''"),
        ({"WORLD_SIZE": "-1"}, "WORLD_SIZE = '-1'"),
        ({"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE = '99"),
        ({"RANK": "1.0"}, "RANK = '1.0'"),
        ({"RANK": "²"}, "RANK = '²'"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK = 'x'"),
        ({"LOCAL_WORLD_SIZE": "two"}, "LOCAL_WORLD_SIZE = 'two'"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT = 'http'"),
        ({"SLURM_RESTART_COUNT": "once"}, "SLURM_RESTART_COUNT = 'once'"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK = 2 and WORLD_SIZE = 2"),
    ],
)
def test_variables_of_a_launcher_that_are_no_numbers_are_refused(
    variables: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if "RANK" in variables:
        monkeypatch.setattr("megatron_dppo.commands.reported.time.sleep", lambda seconds: None)
    for command in (["train", str(EXAMPLE), "--dry-run"], ["plan", str(EXAMPLE), "--world-size", "2"]):
        assert main(command) == 2
        assert words in capsys.readouterr().err or "RANK" in variables

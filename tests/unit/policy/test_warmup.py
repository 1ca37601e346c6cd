"""Warmed-up weights belong to this run only if a readable marker says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_dppo.errors import CheckpointError
from megatron_dppo.run.policy_setup import warmup_from_config
from megatron_dppo.run.warmup import MARKER, is_warm, mark_warm
from tests.unit import configs


def test_weights_count_for_exactly_the_warm_up_that_made_them(tmp_path: Path) -> None:
    interrupted = tmp_path / "checkpoints/warmup"
    interrupted.mkdir(parents=True)
    warmup = warmup_from_config(configs.config())
    assert not is_warm(tmp_path, warmup)
    mark_warm(tmp_path, warmup, tmp_path / "checkpoints")
    assert is_warm(tmp_path, warmup) and not interrupted.exists()
    assert not is_warm(tmp_path, warmup_from_config(configs.config(run={"seed": 5})))


def test_what_names_a_warm_up_stays_so_that_finished_ones_stay_valid() -> None:
    identity = json.loads(
        warmup_from_config(configs.config(run={"seed": 5}, train={"micro_batch_tokens": 64})).identity
    )
    assert list(identity) == ["micro_batch_tokens", "model", "seed", "warmup"]
    assert (identity["seed"], identity["micro_batch_tokens"], identity["model"]["path"]) == (5, 64, "model")


@pytest.mark.parametrize(("changed", "same"), [({}, True), ({"fp32_head_gradient": True}, False)])
def test_a_key_that_an_older_version_did_not_know_counts_as_its_default(
    changed: dict[str, bool], same: bool, tmp_path: Path
) -> None:
    model = {"transformer": {"moe_aux_loss_coeff": 0.01}}
    mark_warm(tmp_path, warmup_from_config(configs.config(model=model)), tmp_path / "checkpoints")
    marker = json.loads((tmp_path / MARKER).read_text())
    identity = json.loads(marker["identity"])
    del identity["model"]["fp32_head_gradient"]
    (tmp_path / MARKER).write_text(json.dumps(marker | {"identity": json.dumps(identity)}))
    assert is_warm(tmp_path, warmup_from_config(configs.config(model=model | changed))) == same
    assert not is_warm(tmp_path, warmup_from_config(configs.config(model=changed)))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"other": 1}', b"3", b"\xff\xfe"])
def test_a_damaged_marker_is_an_error_and_no_fresh_warm_up(content: bytes, tmp_path: Path) -> None:
    (tmp_path / MARKER).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{MARKER} cannot be read .*{tmp_path}"):
        is_warm(tmp_path, warmup_from_config(configs.config()))

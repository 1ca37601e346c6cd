"""The manifest of a checkpoint, and the folders around it: no damage passes, no kill leaves half a checkpoint."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.mcore.checkpoint import folder as checkpoint_folder
from megatron_dppo.mcore.checkpoint.folder import checkpoints, prune, remove_leftovers, set_aside
from megatron_dppo.mcore.checkpoint.manifest import (
    MANIFEST,
    assign_files,
    find_content_problem,
    find_name_or_size_problem,
    hash_files,
    list_files,
    read_manifest,
    write_manifest,
)


def fill(folder: Path) -> None:
    (folder / "inner").mkdir(parents=True)
    for name, data in (("a", b"abc"), ("inner/b", b""), (".metadata", bytes(range(256)))):
        (folder / name).write_bytes(data)
    write_manifest(folder, hash_files(folder, list_files(folder), sync=True))


@pytest.mark.slow
def test_any_changed_bit_of_the_manifest_is_detected(tmp_path: Path) -> None:
    fill(tmp_path)
    text = (tmp_path / MANIFEST).read_bytes()
    whole = read_manifest(tmp_path)
    assert whole is not None and sorted(whole) == [".metadata", "a", "inner/b"]
    for place in range(len(text)):
        for bit in range(8):
            flipped = bytearray(text)
            flipped[place] ^= 1 << bit
            (tmp_path / MANIFEST).write_bytes(flipped)
            with pytest.raises(ValueError, match=MANIFEST):
                read_manifest(tmp_path)
    for length in range(len(text)):
        (tmp_path / MANIFEST).write_bytes(text[:length])
        with pytest.raises(ValueError, match=MANIFEST):
            read_manifest(tmp_path)
    for other in (b"[]", b"null", b'{"files": 3}', b"[" * 100_000, text + b" ", text + text):
        (tmp_path / MANIFEST).write_bytes(other)
        with pytest.raises(ValueError, match=MANIFEST):
            read_manifest(tmp_path)
    (tmp_path / MANIFEST).unlink()
    assert read_manifest(tmp_path) is None


def test_links_and_folders_in_place_of_files_are_detected(tmp_path: Path) -> None:
    fill(tmp_path)
    expected = read_manifest(tmp_path)
    assert expected is not None and not find_name_or_size_problem(tmp_path, expected)
    (tmp_path / ".nfs0001").write_text("a deleted file that is still open somewhere")
    assert not find_name_or_size_problem(tmp_path, expected)
    (tmp_path / "a").unlink()
    (tmp_path / "a").mkdir()
    assert "a is missing" in find_name_or_size_problem(tmp_path, expected)
    (tmp_path / "a").rmdir()
    (tmp_path / "a").symlink_to("/nowhere")
    assert "a cannot be read" in find_name_or_size_problem(tmp_path, expected)
    assert "a cannot be read" in find_content_problem(tmp_path, expected, ["a"])
    (tmp_path / "a").unlink()
    (tmp_path / "a").write_bytes(b"abd")
    assert not find_name_or_size_problem(tmp_path, expected)
    assert find_content_problem(tmp_path, expected, ["inner/b", "a"]).startswith("a has other content")


def test_files_are_assigned_evenly_and_once() -> None:
    dice = random.Random(0)
    for world_size in (1, 2, 7, 32):
        sizes = {f"file{i}": dice.choice([0, 10, dice.randrange(10**9)]) for i in range(100)}
        parts = [assign_files(sizes, rank, world_size) for rank in range(world_size)]
        assert sorted(name for part in parts for name in part) == sorted(sizes)
        loads = [sum(sizes[name] for name in part) for part in parts]
        assert max(loads) - min(loads) <= max(sizes.values()) + len(sizes)


def fake(folder: Path, step: int, *, finite: bool = True) -> Path:
    checkpoint = folder / f"step_{step:06d}"
    fill(checkpoint)
    (checkpoint / "state.json").write_text(json.dumps({"step": step, "finite": finite}))
    return checkpoint


def test_a_killed_prune_leaves_no_incomplete_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = shutil.rmtree

    def die_half_way(path: Path, **options: Any) -> None:
        if path.exists():
            (path / "state.json").unlink()
            raise KeyboardInterrupt

    for step in (1, 2, 3):
        fake(tmp_path, step)
    monkeypatch.setattr(checkpoint_folder.shutil, "rmtree", die_half_way)
    with pytest.raises(KeyboardInterrupt):
        prune(tmp_path, 1, None)
    assert [p.name for p in checkpoints(tmp_path)] == ["step_000002", "step_000003"]
    monkeypatch.setattr(checkpoint_folder.shutil, "rmtree", whole)
    (tmp_path / "step_000004.partial").mkdir()
    (tmp_path / "step_000009.damaged").mkdir()
    (tmp_path / "step_of_mine.partial").mkdir()
    remove_leftovers(tmp_path)
    left = {p.name for p in tmp_path.iterdir()}
    assert left == {"step_000002", "step_000003", "step_000009.damaged", "step_of_mine.partial"}


@pytest.mark.slow
def test_pruning_keeps_the_newest_the_best_and_the_newest_finite(tmp_path: Path) -> None:
    for case in range(200):
        dice, folder = random.Random(case), tmp_path / str(case)
        finite = {step: dice.random() < 0.5 for step in range(1, 7)}
        for step, flag in finite.items():
            (folder / f"step_{step:06d}").mkdir(parents=True)
            (folder / f"step_{step:06d}/state.json").write_text(json.dumps({"finite": flag}))
        keep, best = dice.randint(1, 3), dice.choice([None, 1, 2, 6])
        prune(folder, keep, best)
        expected = set(range(7 - keep, 7)) | ({best} if best else set()) | set([s for s in finite if finite[s]][-1:])
        assert {checkpoint_folder.step_number(p) for p in checkpoints(folder)} == expected, case


def test_setting_aside_never_overwrites(tmp_path: Path) -> None:
    names = [set_aside(fake(tmp_path, 1), "damaged").name for _ in range(3)]
    assert names == ["step_000001.damaged", "step_000001.damaged2", "step_000001.damaged3"]
    assert checkpoints(tmp_path) == []

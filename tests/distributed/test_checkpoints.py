"""Real checkpoints of two ranks, damaged in every file: the older one is used, no traceback, and nothing is run."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_dppo.errors import CheckpointError
from megatron_dppo.parallel.platform import Platform
from megatron_dppo_megatron_cpu.shims import megatron_version
from tests.distributed.parity import Case, HFSide, build_trainer
from tests.distributed.spawn import run_distributed

pytestmark = pytest.mark.distributed

# Megatron Core 0.19.2 keeps in the shards what earlier versions write to common.pt.
MEGATRON_FILES = [".metadata", "metadata.json", "__0_0.distcp", *["common.pt"] * (megatron_version() < (0, 19))]
STATE: dict[str, Any] = {
    "skipped_in_a_row": 0,
    "answers_before": [],
    "best": [-12.5, 1],
    "evaluation_due": False,
    "identity": {"model": {}, "seed": 0, "prompts": ""},
    "layout": {
        "layout": "",
        "world_size": 2,
        "has_expert_parallelism": False,
        "virtual_pipeline_size": None,
        "use_distributed_optimizer": True,
    },
    "config": {"run": {"num_steps": 9}, "data": {"train": ""}, "rollout": {}, "reward": {}, "train": {}},
    "stream": {"cursor": 0, "next": 0, "ages": {}, "waiting": [[]], "draws": [[]]},
}
"""State of a run. Its best score is that of a reward below -1."""


class Evil:
    """Unpickling it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def make_trainer() -> Any:
    from megatron_dppo.mcore.shims import apply_shims

    here = Platform.detect(force_cpu=True)
    apply_shims(here)
    return build_trainer(Case({}), HFSide(Case()).model, here, "fp32")


def damages(file: Path) -> Iterator[tuple[str, bytes | None]]:
    """Names and contents of everything that is done to a file; None = it is deleted."""
    data = file.read_bytes()
    for length in {0, len(data) // 2, len(data) - 1}:
        yield f"cut to {length}", data[:length]
    yield "longer", data + b"\0"
    yield "deleted", None
    for place, bit in ((0, 0), (len(data) // 3, 5), (len(data) // 2, 7), (len(data) - 1, 2)):
        flipped = bytearray(data)
        flipped[place] ^= 1 << bit
        yield f"bit {bit} of byte {place}", bytes(flipped)


def put(file: Path, data: bytes | None) -> None:
    """Change a file after every rank has read it, and before any reads it again."""
    dist.barrier()
    if dist.get_rank() == 0:
        file.unlink(missing_ok=True)
        if data is not None:
            file.write_bytes(data)
    dist.barrier()


def check_every_damage(trainer: Any, folder: Path) -> None:
    from megatron_dppo.setup.resume import find_usable_checkpoint

    older, newest = folder / "step_000001", folder / "step_000002"
    assert find_usable_checkpoint(folder) == (newest, [])
    names = sorted(path.name for path in newest.iterdir())
    assert {*MEGATRON_FILES, "manifest.json", "state.json", "__1_0.distcp"} <= set(names)
    for name in names:
        file = newest / name
        whole = file.read_bytes()
        for what, data in damages(file):
            put(file, data)
            chosen, (passed,) = find_usable_checkpoint(folder)
            assert chosen == older, f"{name}: {what}"
            assert passed.kind == "damaged" and name in passed.reason and "\n" not in passed.reason, passed
            put(file, whole)
    put(newest / "extra.distcp", b"x")
    assert "extra.distcp does not belong" in find_usable_checkpoint(folder)[1][0].reason
    put(newest / "extra.distcp", None)
    assert find_usable_checkpoint(folder) == (newest, [])
    assert trainer.load(newest)["step"] == 2


def check_loads_without_manifest(trainer: Any, folder: Path) -> None:
    """Errors of Megatron itself are CheckpointErrors too; it derives some from BaseException."""
    from megatron_dppo.setup.resume import find_usable_checkpoint

    newest = folder / "step_000002"
    manifest = (newest / "manifest.json").read_bytes()
    put(newest / "manifest.json", None)
    assert find_usable_checkpoint(folder, accept_unverified=True)[0] == newest
    refused = 0
    for name in MEGATRON_FILES:
        file = newest / name
        whole = file.read_bytes()
        for data in (None, whole[: len(whole) // 2]):
            put(file, data)
            try:
                trainer.load(newest)
            except CheckpointError as error:
                refused += 1
                assert "cannot be loaded" in str(error) and "\n" not in str(error)
            put(file, whole)
    assert refused == 2 * len(MEGATRON_FILES)
    put(newest / "manifest.json", manifest)
    # A load that fails may leave weights half read: such a run ends.
    assert trainer.load(newest)["step"] == 2


def check_reading_is_shared(trainer: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank reads what both hold, and both have it; when one cannot read, both end with the same words."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.planner import LoadItemType

    newest, read_data, read = folder / "step_000002", FileSystemReader.read_data, list[str]()

    def note(self: Any, plan: Any, planner: Any) -> Any:
        read.extend(
            f"{i.storage_index.fqn} {i.storage_index.offset}" for i in plan.items if i.type != LoadItemType.BYTE_IO
        )
        return read_data(self, plan, planner)

    def fail(*given: Any, **_: Any) -> Any:
        if len(given) == 3 and len(given[1].items) == 1:  # what is the same for all, in a file of 0.19.2
            return read_data(*given)
        raise OSError(errno.EIO, "Input/output error")

    weights = [weight for weight in trainer.models[0].parameters()]
    before = [weight.detach().clone() for weight in weights]
    for weight in weights:
        weight.data.fill_(dist.get_rank())
    with monkeypatch.context() as patch:
        patch.setattr(FileSystemReader, "read_data", note)
        trainer.load(newest)
    assert all(map(torch.equal, weights, before))
    by_rank: list[Any] = [None, None]
    dist.all_gather_object(by_rank, read)
    for mine in by_rank:
        assert len(mine) > 50 and sum(not name.startswith("optimizer.") for name in mine) > 5
        assert len(set(mine)) == len(mine)
    assert not {*by_rank[0]} & {*by_rank[1]}
    for owner, name in ((FileSystemReader, "read_data"), (torch, "load")):
        with monkeypatch.context() as patch, pytest.raises(CheckpointError) as caught:
            if dist.get_rank() == 1:
                patch.setattr(owner, name, fail)
            trainer.load(newest)
        assert "cannot be loaded: OSError: [Errno 5] Input/output error" in str(caught.value)
        words: list[Any] = [None, None]
        dist.all_gather_object(words, str(caught.value))
        assert words[0] == words[1]


def check_nothing_is_run(trainer: Any, folder: Path) -> None:
    from megatron_dppo.mcore.checkpoint.manifest import hash_files, list_files, write_manifest
    from megatron_dppo.setup.resume import find_usable_checkpoint

    newest, trap = folder / "step_000002", folder / "trap"
    evil = pickle.dumps(Evil(trap))
    if dist.get_rank() == 0:
        pickle.loads(evil)
        trap.rmdir()  # it was made
    metadata = pickle.loads((newest / ".metadata").read_bytes())
    place = next(v for k, v in metadata.storage_data.items() if k.fqn.startswith("random_states"))
    shard = (newest / place.relative_path).read_bytes()
    assert len(evil) < place.length
    for name, data in (
        (".metadata", evil),
        ("common.pt", evil),
        (place.relative_path, shard[: place.offset] + evil + shard[place.offset + len(evil) :]),
    ):
        file = newest / name
        whole = file.read_bytes() if file.exists() else None  # every version reads a common.pt that is there
        put(file, data)
        if dist.get_rank() == 0:
            write_manifest(newest, hash_files(newest, list_files(newest)))
        dist.barrier()
        assert find_usable_checkpoint(folder) == (newest, []), "the manifest fits: only loading can refuse it"
        with pytest.raises(CheckpointError, match="cannot be loaded"):
            trainer.load(newest)
        assert not trap.exists(), name
        put(file, whole)
    if dist.get_rank() == 0:
        write_manifest(newest, hash_files(newest, list_files(newest)))
    dist.barrier()


def check_finite_weights_are_kept(trainer: Any, folder: Path) -> None:
    from megatron_dppo.mcore.checkpoint.folder import checkpoints
    from megatron_dppo.setup.resume import find_usable_checkpoint

    weight = next(iter(trainer.models[0].parameters()))
    before = weight.data.flatten()[0].clone()
    if dist.get_rank() == 1:
        weight.data.view(-1)[0] = float("nan")
    manifest = (folder / "step_000002/manifest.json").read_bytes()
    trainer.save(folder, 2, {**STATE, "step": 2}, keep=1)
    assert (folder / "step_000002/manifest.json").read_bytes() == manifest, "finite weights were written over"
    for step in (3, 4, 5):
        trainer.save(folder, step, {**STATE, "step": step}, keep=2)
        assert json.loads((folder / f"step_{step:06d}/state.json").read_text())["finite"] is False
    assert [path.name for path in checkpoints(folder)] == ["step_000002", "step_000004", "step_000005"]
    chosen, skipped_checkpoints = find_usable_checkpoint(folder)
    assert chosen == folder / "step_000002" and [each.kind for each in skipped_checkpoints] == ["nonfinite"] * 2
    weight.data.view(-1)[0] = before
    part = trainer.optimizer.megatron.chained_optimizers[0]
    moment = next(iter(part.optimizer.state.values()))["exp_avg_sq"]
    moment.view(-1)[-1] = float("inf")
    trainer.save(folder, 6, {**STATE, "step": 6}, keep=1)
    assert find_usable_checkpoint(folder)[0] == folder / "step_000002", (
        "an infinite moment ends the run at its next update"
    )
    moment.view(-1)[-1] = 0.0
    trainer.save(folder, 7, {**STATE, "step": 7}, keep=1)
    assert [path.name for path in checkpoints(folder)] == ["step_000007"]


def check_no_good_one(trainer: Any, folder: Path) -> None:
    from megatron_dppo.setup.resume import find_usable_checkpoint

    put(folder / "step_000007/metadata.json", b"")
    with pytest.raises(CheckpointError, match=r"\n  step_000007: metadata.json has 0 bytes"):
        find_usable_checkpoint(folder)
    if dist.get_rank() == 0:
        shutil.rmtree(folder / "step_000007")
    dist.barrier()
    assert find_usable_checkpoint(folder) == (None, [])


def check_weights_alone(trainer: Any, folder: Path) -> None:
    """Files of the conversion tools, written and read."""
    from megatron_dppo.mcore.checkpoint.save_load import load_model, save_model

    save_model(folder, trainer.models, {"note.json": "{}"})
    assert (
        load_model(folder, trainer.models, groups=trainer.groups) == ""
        and not folder.with_name("alone.partial").exists()
    )
    whole = (folder / "metadata.json").read_bytes()
    put(folder / "metadata.json", whole[:-1])
    with pytest.raises(CheckpointError, match=r"damaged: metadata\.json"):
        load_model(folder, trainer.models, groups=trainer.groups)
    put(folder / "metadata.json", whole)
    put(folder / "manifest.json", None)
    assert "it has no manifest.json" in load_model(folder, trainer.models, groups=trainer.groups)


def check_megatron_lm_would_resume(trainer: Any, folder: Path) -> None:
    """Without these values Megatron-LM's ``load_checkpoint`` (d98e8a64dd) exits, or takes the weights for old ones."""
    from megatron.core import dist_checkpointing

    newest = str(folder / "step_000002")
    common = dist_checkpointing.load_common_state_dict(newest)
    assert common["iteration"] == 2
    assert common["checkpoint_version"] >= 2, "else several chunks of a model are refused"
    content = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
    assert content == {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def all_checks(rank: int, world_size: int, path: str) -> None:
    trainer, folder = make_trainer(), Path(path)
    for step in (1, 2):
        trainer.save(folder, step, {**STATE, "step": step}, keep=2)
    check_megatron_lm_would_resume(trainer, folder)
    check_every_damage(trainer, folder)
    check_loads_without_manifest(trainer, folder)
    check_reading_is_shared(trainer, folder, pytest.MonkeyPatch())
    check_nothing_is_run(trainer, folder)
    check_finite_weights_are_kept(trainer, folder)
    check_no_good_one(trainer, folder)
    check_weights_alone(trainer, folder / "alone")
    assert torch.isfinite(next(iter(trainer.models[0].parameters()))).all()


def test_every_damage_of_every_file_is_found_and_costs_the_newest_checkpoint_alone(tmp_path: Path) -> None:
    run_distributed(all_checks, 2, str(tmp_path), timeout=480)


def cannot_save(rank: int, world_size: int, folder: str) -> None:
    trainer = make_trainer()
    trainer.check_can_save()
    if rank == 1:
        part = trainer.optimizer.megatron.chained_optimizers[0]
        part.sharded_state_dict = None
    with pytest.raises(CheckpointError, match=r"saved: TypeError: .* \(on rank 1\)"):
        trainer.check_can_save()
    assert not list(Path(folder).iterdir())


def test_a_run_that_cannot_save_is_refused_on_all_ranks_before_it_writes(tmp_path: Path) -> None:
    run_distributed(cannot_save, 2, str(tmp_path))

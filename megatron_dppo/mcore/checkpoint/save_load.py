"""Saving and loading of Megatron torch_dist checkpoints: model, optimizer and random states.

A checkpoint is written to ``step_N.partial``, gets a manifest, and is renamed to ``step_N`` after every rank has
finished. A process that dies during a save leaves older checkpoints untouched. See docs/checkpoints.md.
"""

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.models.gpt import GPTModel

from megatron_dppo.errors import CheckpointError
from megatron_dppo.files import disk_errors, write_synced
from megatron_dppo.mcore.checkpoint import folder as checkpoint_folder
from megatron_dppo.mcore.checkpoint import manifest
from megatron_dppo.mcore.checkpoint.folder import STATE, checkpoint_name
from megatron_dppo.mcore.checkpoint.format import StreamedSave, read_sharded, run_on_all_ranks, shared_save
from megatron_dppo.mcore.lora import trainable_module
from megatron_dppo.mcore.optim import Optimizer, optimizer_tensors
from megatron_dppo.mcore.setup import random_states, restore_random_states
from megatron_dppo.parallel.groups import ParallelGroups
from megatron_dppo.parallel.objects import all_gather_objects, run_on_leader

_METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
_MEGATRON_LM_VERSION = 3.0
"""Version of the layout of weights, for Megatron-LM's loader. Without one it assumes layouts of 2019."""
_SHARD = re.compile(r"__(\d+)_\d+\.distcp")
NO_MANIFEST = f"it has no {manifest.MANIFEST}, so that nothing shows whether its files are whole"
"""Result of ``find_damage`` for a checkpoint that an older version or another program wrote."""


class CheckpointSave:
    """A save of a checkpoint, which may go on in a background thread.

    ``path`` is the folder of the complete checkpoint. ``work``, a collective of all ranks, writes it; its process group
    must not be used elsewhere if it runs ``in_background``. ``end_time`` (``time.monotonic``) is when this rank
    finished writing, valid after ``wait``.
    """

    def __init__(
        self, path: Path, is_finite: bool, work: Callable[[], None] | None = None, *, in_background: bool = False
    ) -> None:
        self.path = path
        self.is_finite = is_finite
        self._error: BaseException | None = None
        self._thread: Thread | None = None
        self.end_time = 0.0
        if work is not None and in_background:
            # A daemon thread: a process that ends with an error does not wait for ranks that have died.
            self._thread = Thread(target=self._run, args=(work,), name=f"save {path.name}", daemon=True)
            self._thread.start()
        else:
            if work is not None:
                work()
            self.end_time = time.monotonic()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        # torch's CheckpointException is a BaseException, not an Exception.
        except BaseException as error:
            self._error = error
        self.end_time = time.monotonic()

    @property
    def is_done(self) -> bool:
        """True if this rank has finished writing, successfully or not."""
        return self._thread is None or not self._thread.is_alive()

    def join(self) -> None:
        """Wait until this rank has finished writing, successfully or not."""
        if self._thread is not None:
            self._thread.join()

    def wait(self) -> Path:
        """Wait until the checkpoint is complete on all ranks, and return its folder; raises as ``save_checkpoint``."""
        self.join()
        if self._error is not None:
            raise self._error
        return self.path


def save_checkpoint(
    folder: Path,
    step: int,
    models: Sequence[GPTModel],
    optimizer: Optimizer,
    state: Mapping[str, object],
    keep: int,
    best: int | None = None,
    *,
    groups: ParallelGroups,
    write_extra: Callable[[Path], None] | None = None,
    background_group: dist.ProcessGroup | None = None,
) -> CheckpointSave:
    """Write ``folder/step_N``, then delete all but the ``keep`` newest checkpoints and that of the step ``best``.

    Long because what is staged now and what is written later read in one order.

    A collective of all ranks. Each rank writes its part of the optimizer state; ranks that hold the same weights divide
    the writing among them. A checkpoint of finite weights is never replaced by one of the same step whose weights are
    not finite: the JSON values of ``state`` get the key ``finite``.

    ``write_extra`` is called on every rank to write into the unfinished folder. With ``background_group``, a CPU group
    of all ranks that nothing else uses, this rank's tensors are copied to host memory, and a thread writes them while
    the model trains.

    Raises:
        DiskError: The disk is full or cannot be written to. Older checkpoints are unchanged.
    """
    final = folder / checkpoint_name(step)
    partial = checkpoint_folder.partial_path(final)
    is_finite = _all_finite(models, optimizer)
    if not is_finite and run_on_leader(lambda: checkpoint_folder.is_finite(final), groups.world):
        return CheckpointSave(final, True)
    world = background_group or groups.world
    description = f"the checkpoint of step {step}"

    # Now: create the folder, and stage this rank's tensors if they are written in the background.
    with disk_errors(folder, description):
        run_on_leader(lambda: checkpoint_folder.create_partial(partial), groups.world)
        strategy = shared_save(world, groups.dp_cp, staged=background_group is not None)
        tensors = _start_saving(_sharded_state(models, optimizer, is_loading=False), step, partial, strategy)
        if write_extra is not None:
            write_extra(partial)
    # Later: write the shards, hash all files, and publish by one rename.
    text = json.dumps({**state, "finite": is_finite}, indent=2)

    def publish() -> None:
        checkpoint_folder.complete(partial, final)
        if best is not None:
            checkpoint_folder.write_best(folder, best)
        checkpoint_folder.prune(folder, keep, best)

    def write() -> None:
        with disk_errors(folder, description):
            tensors.async_fn()
            _seal(partial, {STATE: text}, world)
            run_on_leader(publish, world)

    return CheckpointSave(final, is_finite, write, in_background=background_group is not None)


def _all_finite(models: Sequence[GPTModel], optimizer: Optimizer) -> bool:
    """Return True if no weight, moment or main parameter of any rank is infinite or NaN; a collective."""
    weights = [parameter for model in models for parameter in model.parameters()]
    worst = torch.zeros((), dtype=torch.int32, device=weights[0].device)
    for tensor in (*weights, *optimizer_tensors(optimizer)):
        # One read without an allocation of the tensor's size. Both are NaN if one element is.
        smallest, largest = torch.aminmax(tensor.detach())
        worst = torch.maximum(worst, (~(smallest.isfinite() & largest.isfinite())).to(worst))
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return not int(worst)


def check_can_save(models: Sequence[GPTModel], optimizer: Optimizer) -> None:
    """Check that a checkpoint of this model and optimizer can be saved, without writing it; a collective.

    A run may save for the first time at its end: what makes it impossible has to show before the first step.
    """
    try:
        state = run_on_all_ranks(lambda: _sharded_state(models, optimizer, is_loading=False))
        run_on_all_ranks(lambda: save_preprocess(state))
    except CheckpointError as error:
        raise CheckpointError(
            f"a checkpoint of this run cannot be saved: {error}. This combination of parallel layout, trained weights "
            "and optimizer is not supported. Change one of them, and please report it"
        ) from error


def _start_saving(state: dict[str, Any], step: int, folder: Path, strategy: Any) -> AsyncRequest:
    """Return the request that writes a state, with what Megatron-LM's loader reads beside it."""
    megatron_lm = {"checkpoint_version": _MEGATRON_LM_VERSION, "iteration": step}
    return dist_checkpointing.save(
        {**megatron_lm, **state}, str(folder), strategy, async_sharded_save=True, content_metadata=dict(_METADATA)
    )


def _seal(folder: Path, texts: dict[str, str], group: dist.ProcessGroup | None) -> None:
    """Write the last files, sync all files to disk and write their manifest; a collective of all ranks.

    The files of all ranks exist already: torch's writer has gathered their names.
    """
    rank = dist.get_rank()
    world = dist.get_world_size()

    def write_texts() -> dict[str, int]:
        save_config(CheckpointingConfig("torch_dist", 1), str(folder))
        for name, text in texts.items():
            write_synced(folder / name, text)
        return {name: (folder / name).stat().st_size for name in manifest.list_files(folder)}

    sizes = run_on_leader(write_texts, group)
    # Each rank hashes the shards it has written, which are still in its machine's page cache.
    written_by = {name: int(match[1]) for name in sizes if (match := _SHARD.fullmatch(name)) and int(match[1]) < world}
    other_files = manifest.assign_files(
        {name: size for name, size in sizes.items() if name not in written_by}, rank, world
    )
    names = [*other_files, *(name for name, writer in written_by.items() if writer == rank)]
    parts = all_gather_objects(manifest.hash_files(folder, names, sync=True), group)
    records = {name: record for part in parts for name, record in part.items()}
    run_on_leader(lambda: manifest.write_manifest(folder, records), group)


def find_damage(checkpoint: Path) -> str:
    """Return how a checkpoint's files differ from those that were written, as one line; a collective of all ranks.

    Empty if nothing differs, ``NO_MANIFEST`` if there is no manifest. Every rank reads a share of the files. Without
    process groups, in a dry run, this process reads all of them.
    """
    everyone = dist.group.WORLD if dist.is_initialized() else None
    rank, world = (0, 1) if everyone is None else (dist.get_rank(), dist.get_world_size())
    problem, records = run_on_leader(lambda: _compare_names_and_sizes(checkpoint), everyone)
    if problem:
        return problem
    sizes = {name: record.size for name, record in records.items()}
    names = manifest.assign_files(sizes, rank, world)
    problems = all_gather_objects(manifest.find_content_problem(checkpoint, records, names), everyone)
    return next((problem for problem in problems if problem), "")


def _compare_names_and_sizes(checkpoint: Path) -> tuple[str, dict[str, manifest.FileRecord]]:
    try:
        records = manifest.read_manifest(checkpoint)
        if records is None:
            return NO_MANIFEST, {}
        return manifest.find_name_or_size_problem(checkpoint, records), records
    except (OSError, ValueError) as error:
        return str(error), {}


def load_checkpoint(
    checkpoint: Path,
    models: Sequence[GPTModel],
    optimizer: Optimizer,
    *,
    groups: ParallelGroups,
    same_layout: bool = True,
) -> None:
    """Restore model, optimizer and, on the same layout, random states; a collective of all ranks.

    Ranks that hold the same weights divide the reading. The caller checks the files with ``find_damage`` first.
    """
    template = _sharded_state(models, optimizer, is_loading=True)
    if not same_layout:
        # Random states exist once per rank and do not fit other ranks.
        del template["random_states"]
    loaded = read_sharded(template, checkpoint, groups.edp)
    _load_models(models, loaded)
    optimizer.load_state_dict(loaded["optimizer"])
    if same_layout:
        restore_random_states(loaded["random_states"])


def save_model(folder: Path, models: Sequence[GPTModel], texts: dict[str, str]) -> None:
    """Write the weights alone, and text files beside them, to a new folder; a collective of all ranks."""
    partial = checkpoint_folder.partial_path(folder)
    with disk_errors(folder, "the weights"):
        run_on_leader(lambda: checkpoint_folder.create_partial(partial), dist.group.WORLD)
        _start_saving(_sharded_model(models), 0, partial, StreamedSave(None)).async_fn()
        _seal(partial, texts, dist.group.WORLD)
        run_on_leader(lambda: checkpoint_folder.complete(partial, folder), dist.group.WORLD)


def load_model(checkpoint: Path, models: Sequence[GPTModel], *, groups: ParallelGroups) -> str:
    """Restore the weights alone, from a checkpoint of any layout, and return a warning or ""; a collective."""
    damage = find_damage(checkpoint)
    if damage and damage != NO_MANIFEST:
        raise CheckpointError(f"{checkpoint} is damaged: {damage}. Fix: use a copy of it, or an older checkpoint.")
    loaded = read_sharded(_sharded_model(models), checkpoint, groups.edp)
    _load_models(models, loaded)
    return f"{checkpoint}: {damage}" if damage else ""


def _load_models(models: Sequence[GPTModel], loaded: dict[str, Any]) -> None:
    for key, module in _trainable_modules(models).items():
        module.load_state_dict(loaded[key])


def _sharded_model(models: Sequence[GPTModel]) -> dict[str, Any]:
    modules = _trainable_modules(models)
    return {key: module.sharded_state_dict(metadata=dict(_METADATA)) for key, module in modules.items()}


def _trainable_modules(models: Sequence[GPTModel]) -> dict[str, Any]:
    return {f"model{i}" if len(models) > 1 else "model": trainable_module(model) for i, model in enumerate(models)}


def _sharded_state(models: Sequence[GPTModel], optimizer: Optimizer, *, is_loading: bool) -> dict[str, Any]:
    state = _sharded_model(models)
    model_state = state["model"] if len(models) == 1 else dict(state)
    state["optimizer"] = optimizer.sharded_state_dict(model_state, is_loading=is_loading, metadata=dict(_METADATA))
    state["random_states"] = ShardedObject(
        "random_states", random_states(), (dist.get_world_size(),), (dist.get_rank(),)
    )
    return state

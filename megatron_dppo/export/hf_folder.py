"""Hugging Face folders from a stream of weights. All ranks have the stream, and each writes some of the files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial as partial_function
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from megatron_dppo.errors import CheckpointError, DiskError
from megatron_dppo.export.quantization import Quantization, is_quantized, quantize_stream
from megatron_dppo.files import disk_errors, fsync, usual_rights
from megatron_dppo.hf.families.fused_experts import INTERLEAVED
from megatron_dppo.hf.folder import (
    Weights,
    WeightStream,
    drain,
    is_nested_config,
    num_joined_experts,
    stored_dtype,
    with_served_keys,
)
from megatron_dppo.hf.published_names import is_carried, published_name
from megatron_dppo.hf.weight_files import FolderWeights
from megatron_dppo.parallel.objects import all_gather_objects, run_on_leader

_WHAT = "the weights"
_FP32_BYTES = 4
COPIED = {".json", ".txt", ".model", ".jinja"}
"""Suffixes of a model's files other than weights."""


def save_hf_folder(
    target: str | Path,
    source: str | Path,
    weights: WeightStream,
    dtype: torch.dtype | None,
    *,
    config: Mapping[str, object] | None = None,
    group: dist.ProcessGroup | None = None,
    max_shard_bytes: int = 5 * 2**30,
    quantization: Quantization | None = None,
) -> None:
    """Write a Hugging Face folder: config and tokenizer files of ``source``, weights from the stream.

    Names are those of ``source``, one weight for each expert (gpt-oss: one tensor for all). Weights of ``source`` that
    are not trained (vision model, layers for further tokens) are copied. What ``source`` stores in fp32 beside weights
    of 16 bits (norms of Qwen3.5's linear attention) stays in fp32.

    The folder appears complete and synced to disk, by a rename, and replaces an older one of that name. The stream, the
    same on all ranks of ``group``, is consumed to its end in any case. A rank holds the tensors of one file at a time,
    of ``max_shard_bytes`` or one larger tensor; file k is written by rank k modulo their number. Tensors of a stream
    that is quantized already keep their dtypes.

    ``dtype`` None keeps every tensor's dtype, and config.json's entry. ``config`` is the content of config.json; None
    takes that of ``source``. ``quantization`` applies to the weights after they are rounded to ``dtype``.

    Raises:
        DiskError: On all ranks, if one of them cannot write.
        CheckpointError: The format of ``quantization`` cannot hold a weight, or ``source`` joins experts.
    """
    target = Path(target)
    if quantization is not None:
        _check_separate_experts(source, quantization)
    partial = target.with_name(target.name + ".partial")
    rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    fp32_names = frozenset[str]()
    if config is None and dtype is not None and dtype.itemsize < _FP32_BYTES:
        fp32_names = _fp32_names(Path(source))
    written_dtype = partial_function(_written_dtype, dtype=dtype, fp32_names=fp32_names)
    writer = _FileWriter(partial, rank, size, written_dtype, max_shard_bytes)
    stream = iter(weights if quantization is None else quantize_stream(_round_weights(weights, dtype), quantization))
    if config is None:
        stream = _complete(stream, Path(source))
    try:
        run_on_leader(lambda: _write_config(target, partial, Path(source), dtype, config), group)
        _run_on_all(lambda: writer.write(stream), target, group)
        _run_on_all(writer.rename_files, target, group)
        quantization_config = None if quantization is None else quantization.config(writer.names())
        run_on_leader(lambda: _publish(writer, partial, target, quantization_config), group)
    finally:
        # The stream is a collective: a rank that failed must still take every tensor, or the others wait for it.
        drain(stream)
        writer.close()


def _check_separate_experts(source: str | Path, quantization: Quantization) -> None:
    if num_joined_experts(source) is not None:
        raise CheckpointError(
            f"Expected a model with one weight for each expert for a folder in {quantization.format}, got {source}, "
            "which joins the experts of a layer in one tensor. Fix: write it without quantization."
        )


def _fp32_names(source: Path) -> frozenset[str]:
    """Return the weights that a folder stores in fp32 while its config.json says 16 bits; names as in the folder."""
    values = json.loads((source / "config.json").read_text(encoding="utf-8"))
    values = values | (values.get("text_config") or {})
    is_half = (values.get("dtype") or values.get("torch_dtype")) in ("bfloat16", "float16")
    if not is_half or not any(source.glob("*.safetensors")):
        return frozenset()
    weights = FolderWeights(source)
    rename = published_name if is_nested_config(source) else str
    return frozenset(rename(name) for name in weights.names() if weights.describe(name)[1] == "F32")


def _complete(weights: WeightStream, source: Path) -> Weights:
    """Stream the weights by their names in ``source``, then those of ``source`` that are not trained."""
    rename = published_name if is_nested_config(source) else str
    num_experts = num_joined_experts(source)
    if num_experts is not None:
        weights = INTERLEAVED.join(weights, num_experts)
    for name, tensor in weights:
        yield rename(name), tensor
    # A folder for ``model.random_init`` has no weights.
    if any(source.glob("*.safetensors")):
        for name, weight in FolderWeights(source).carried.items():
            yield name, weight.read()


def _round_weights(weights: WeightStream, dtype: torch.dtype | None) -> WeightStream:
    for name, tensor in weights:
        yield name, tensor.detach().to(_written_dtype(name, tensor, dtype))


def _written_dtype(
    name: str, tensor: Tensor, dtype: torch.dtype | None, fp32_names: frozenset[str] = frozenset()
) -> torch.dtype:
    if dtype is None or is_quantized(tensor) or is_carried(name):
        return tensor.dtype
    return torch.float32 if name in fp32_names else stored_dtype(name, dtype)


def _run_on_all(work: Callable[[], None], target: Path, group: dist.ProcessGroup | None) -> None:
    """Run work on every rank, and raise the disk error of one rank on all."""
    problem = None
    try:
        with disk_errors(target, _WHAT):
            work()
    except DiskError as disk_error:
        problem = str(disk_error)
    problems = [text for text in all_gather_objects(problem, group) if text is not None]
    if problems:
        error = DiskError(problems[0])
        error.on_every_rank = True
        raise error


def _write_config(
    target: Path, partial: Path, source: Path, dtype: torch.dtype | None, config: Mapping[str, Any] | None
) -> None:
    """Create the partial folder with everything but weights."""
    with disk_errors(target, _WHAT):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for file in source.iterdir():
            # Not the index of the source's weights: ``write_index`` makes the one of the new files.
            if file.is_file() and file.suffix in COPIED and "safetensors" not in file.name:
                shutil.copyfile(file, partial / file.name)
        written: dict[str, Any] = with_served_keys(
            json.loads((partial / "config.json").read_text()) if config is None else config
        )
        # Weights in MXFP4 were read as bf16.
        if (written.get("quantization_config") or {}).get("quant_method") == "mxfp4":
            del written["quantization_config"]
        if dtype is not None:
            # A nested language model has an entry of its own.
            for entry in (written, written.get("text_config")):
                if isinstance(entry, dict):
                    entry.pop("torch_dtype", None)
                    entry["dtype"] = str(dtype).removeprefix("torch.")
        (partial / "config.json").write_text(json.dumps(written, indent=2) + "\n")


def _publish(writer: _FileWriter, partial: Path, target: Path, quantization: dict[str, Any] | None) -> None:
    """Complete the partial folder and give it its name."""
    with disk_errors(target, _WHAT):
        writer.write_index()
        if quantization is not None:
            config = json.loads((partial / "config.json").read_text()) | {"quantization_config": quantization}
            (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for file in partial.iterdir():
            if file.suffix != ".safetensors":
                fsync(file)
        # The rename must not reach the disk before the files do.
        fsync(partial)
        # POSIX renames no folder onto one that has files.
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        fsync(target.parent)


class _FileWriter:
    """Writer of the safetensors files of a folder; every rank counts all files and writes its share of them."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        size: int,
        written_dtype: Callable[[str, Tensor], torch.dtype],
        max_bytes: int,
    ) -> None:
        self._folder = folder
        self._rank = rank
        self._size = size
        self._written_dtype = written_dtype
        self._max_bytes = max_bytes
        self._file_numbers: dict[str, int] = {}
        self._bytes = 0
        self._buffer: dict[str, Tensor] = {}
        # With several ranks, a file is written while the tensors of other ranks are gathered; one rank gains nothing.
        self._thread = ThreadPoolExecutor(1) if size > 1 else None
        self._writing: Future[None] | None = None

    def write(self, weights: WeightStream) -> None:
        """Write the tensors of the stream that belong to this rank's files."""
        # Every rank counts all files, so that numbers and index agree without communication.
        number = 0
        file_bytes = 0
        for name, tensor in weights:
            dtype = self._written_dtype(name, tensor)
            size = tensor.numel() * dtype.itemsize
            if file_bytes and file_bytes + size > self._max_bytes:
                self._flush(number)
                number += 1
                file_bytes = 0
            if number % self._size == self._rank:
                # One file in memory at a time: the previous one must be written before this one is filled.
                self._wait()
                # A copy even on a CPU, because a thread writes it later.
                self._buffer[name] = tensor.detach().to("cpu", dtype, copy=True).contiguous()
            self._file_numbers[name] = number
            self._bytes += size
            file_bytes += size
        self._flush(number)
        self._wait()

    def _flush(self, number: int) -> None:
        if not self._buffer:
            return
        buffer = self._buffer
        self._buffer = {}
        if self._thread is None:
            self._write_file(number, buffer)
        else:
            self._writing = self._thread.submit(self._write_in_thread, number, buffer)

    def _write_in_thread(self, number: int, tensors: dict[str, Tensor]) -> None:
        self._write_file(number, tensors)

    def _write_file(self, number: int, tensors: dict[str, Tensor]) -> None:
        file = self._part(number)
        with usual_rights(file):
            save_file(tensors, file, metadata={"format": "pt"})
        fsync(file)

    def _wait(self) -> None:
        if self._writing is not None:
            writing = self._writing
            self._writing = None
            writing.result()

    def _part(self, number: int) -> Path:
        return self._folder / f"part-{number}.safetensors"

    def _count(self) -> int:
        return max(self._file_numbers.values(), default=-1) + 1

    def _name(self, number: int) -> str:
        count = self._count()
        return "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"

    def names(self) -> Iterable[str]:
        """Return the names of all tensors of the stream."""
        return self._file_numbers.keys()

    def rename_files(self) -> None:
        """Give this rank's files their final names, which contain the number of files."""
        for number in range(self._rank, self._count(), self._size):
            self._part(number).rename(self._folder / self._name(number))

    def write_index(self) -> None:
        """Write the index of tensors to files, if there are several files."""
        if self._count() > 1:
            weight_map = {name: self._name(number) for name, number in self._file_numbers.items()}
            text = json.dumps({"metadata": {"total_size": self._bytes}, "weight_map": weight_map}, indent=2)
            (self._folder / "model.safetensors.index.json").write_text(text + "\n")

    def close(self) -> None:
        """Stop the thread."""
        if self._thread is not None:
            self._thread.shutdown()

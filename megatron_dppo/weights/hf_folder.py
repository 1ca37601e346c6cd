"""A stream of weights as a Hugging Face folder; its files are written by all ranks, each of which has the stream."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from megatron_dppo.errors import DiskError
from megatron_dppo.files import disk_errors, fsync
from megatron_dppo.hf.folder import WeightStream, drain, stored_dtype
from megatron_dppo.parallel.objects import agreed, from_each
from megatron_dppo.weights.quantization import Quantization, is_quantized, quantized

_WHAT = "the weights"
COPIED = {".json", ".txt", ".model", ".jinja"}
"""Kinds of files of a model that are no weights"""


def save_hf_folder(
    target: str | Path,
    source: str | Path,
    weights: WeightStream,
    dtype: torch.dtype | None,
    *,
    config: Mapping[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
    max_shard_bytes: int = 5 * 2**30,
    quantization: Quantization | None = None,
) -> None:
    """Write a Hugging Face folder: config and tokenizer files of ``source``, weights from the stream.

    Tensors of a stream that is quantised already keep their types.

    The folder appears at once, complete and on the disk, by a rename; an older one of that name is replaced. The
    stream is taken to its end, whatever happens. A rank holds one file's tensors at a time.

    Args:
        target: the folder, on a file system that all ranks of ``group`` see.
        source: the folder that ``config.json`` and the tokenizer come from.
        weights: full tensors by Hugging Face name, the same on all ranks.
        dtype: that they are written in. None = every tensor in its own, and config.json keeps its dtype.
        config: written as config.json. None = that of ``source``.
        group: ranks that call this together; file k is written by rank k modulo their number. None = this one alone.
        max_shard_bytes: of one file; a larger tensor gets one for itself.
        quantization: of the weights after they were rounded to ``dtype``; config.json says it. None = none.

    Raises:
        DiskError: on all ranks, when one of them cannot write.
        CheckpointError: weights that the format of ``quantization`` cannot hold.
    """
    target, partial = Path(target), Path(target).with_name(Path(target).name + ".partial")
    rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    files = _Files(partial, rank, size, dtype, max_shard_bytes)
    stream = iter(weights if quantization is None else quantized(_rounded(weights, dtype), quantization))
    try:
        agreed(lambda: _begin(target, partial, Path(source), dtype, config), group)
        _together(lambda: files.take(stream), target, group)
        _together(files.name, target, group)
        settings = None if quantization is None else quantization.config(files.names())
        agreed(lambda: _publish(files, partial, target, settings), group)
    finally:
        drain(stream)
        files.close()


def _rounded(weights: WeightStream, dtype: torch.dtype | None) -> WeightStream:
    for name, tensor in weights:
        yield name, tensor.detach().to(_written_dtype(name, tensor, dtype))


def _written_dtype(name: str, tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return tensor.dtype if dtype is None or is_quantized(tensor) else stored_dtype(name, dtype)


def _together(work: Callable[[], None], target: Path, group: dist.ProcessGroup | None) -> None:
    """Work of every rank; what one of them cannot write is raised on all."""
    problem = None
    try:
        with disk_errors(target, _WHAT):
            work()
    except DiskError as error:
        problem = str(error)
    problems = [text for text in from_each(problem, group) if text is not None]
    if problems:
        found = DiskError(problems[0])
        found.on_every_rank = True
        raise found


def _begin(
    target: Path, partial: Path, source: Path, dtype: torch.dtype | None, config: Mapping[str, Any] | None
) -> None:
    with disk_errors(target, _WHAT):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for file in source.iterdir():
            if file.is_file() and file.suffix in COPIED and "safetensors" not in file.name:
                shutil.copyfile(file, partial / file.name)
        written = dict(json.loads((partial / "config.json").read_text()) if config is None else config)
        if dtype is not None:
            written.pop("torch_dtype", None)
            written["dtype"] = str(dtype).removeprefix("torch.")
        (partial / "config.json").write_text(json.dumps(written, indent=2) + "\n")


def _publish(files: _Files, partial: Path, target: Path, quantization: dict[str, Any] | None) -> None:
    with disk_errors(target, _WHAT):
        files.write_index()
        if quantization is not None:
            config = json.loads((partial / "config.json").read_text()) | {"quantization_config": quantization}
            (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for file in partial.iterdir():
            if file.suffix != ".safetensors":
                fsync(file)
        fsync(partial)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        fsync(target.parent)


class _Files:
    """The safetensors files of a folder; every rank follows all of them and writes those that are its own."""

    def __init__(self, folder: Path, rank: int, size: int, dtype: torch.dtype | None, max_bytes: int) -> None:
        self._folder, self._rank, self._size, self._dtype, self._max_bytes = folder, rank, size, dtype, max_bytes
        self._place: dict[str, int] = {}
        """of each tensor: the number of its file"""
        self._bytes = 0
        self._buffer: dict[str, Tensor] = {}
        # Where ranks take turns, a file is written while the next ones are gathered; alone nothing would be gained.
        self._writer = ThreadPoolExecutor(1) if size > 1 else None
        self._writing: Future[None] | None = None

    def take(self, weights: WeightStream) -> None:
        """Write the tensors of the stream that belong to this rank's files."""
        number = filled = 0
        for name, tensor in weights:
            dtype = _written_dtype(name, tensor, self._dtype)
            size = tensor.numel() * dtype.itemsize
            if filled and filled + size > self._max_bytes:
                self._flush(number)
                number, filled = number + 1, 0
            if number % self._size == self._rank:
                self._wait()
                self._buffer[name] = tensor.detach().to("cpu", dtype, copy=True).contiguous()
            self._place[name] = number
            self._bytes += size
            filled += size
        self._flush(number)
        self._wait()

    def _flush(self, number: int) -> None:
        if not self._buffer:
            return
        buffer, self._buffer = self._buffer, {}
        if self._writer is None:
            self._write(number, buffer)
        else:
            self._writing = self._writer.submit(self._write_beside, number, buffer)

    def _write_beside(self, number: int, tensors: dict[str, Tensor]) -> None:
        """In the thread."""
        self._write(number, tensors)

    def _write(self, number: int, tensors: dict[str, Tensor]) -> None:
        file = self._part(number)
        save_file(tensors, file, metadata={"format": "pt"})
        fsync(file)

    def _wait(self) -> None:
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def _part(self, number: int) -> Path:
        return self._folder / f"part-{number}.safetensors"

    def _count(self) -> int:
        return max(self._place.values(), default=-1) + 1

    def _name(self, number: int) -> str:
        count = self._count()
        return "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"

    def names(self) -> Iterable[str]:
        """All tensors that came."""
        return self._place.keys()

    def name(self) -> None:
        """Give this rank's files the names that they keep, now that their number is known."""
        for number in range(self._rank, self._count(), self._size):
            self._part(number).rename(self._folder / self._name(number))

    def write_index(self) -> None:
        """Which tensor is in which file, where there are several."""
        if self._count() > 1:
            weight_map = {name: self._name(number) for name, number in self._place.items()}
            text = json.dumps({"metadata": {"total_size": self._bytes}, "weight_map": weight_map}, indent=2)
            (self._folder / "model.safetensors.index.json").write_text(text + "\n")

    def close(self) -> None:
        """End the thread."""
        if self._writer is not None:
            self._writer.shutdown()

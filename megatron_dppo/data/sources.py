"""Readers of data rows: JSONL files, JSON arrays, Parquet files and data sets of the Hugging Face hub."""

import re
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from megatron_dppo.data.json_values import check_values, parse_array, parse_object
from megatron_dppo.errors import DataError
from megatron_dppo.files import is_hub_name
from megatron_dppo.source_names import HUB, name_sources

_HUB_ADDRESS = re.compile(r"(?:hf://|https?://huggingface\.co/)datasets/([^/\s]+/[^/\s?#]+)")
_PARQUET_MAGIC = b"PAR1"
_BOM = b"\xef\xbb\xbf"
_START_BYTES = 4096
_BINARY_FORMATS = {
    b"\x1f\x8b": "compressed with gzip",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"BZh": "compressed with bzip2",
    b"\xfd7zXZ": "compressed with xz",
    b"PK\x03\x04": "a zip archive",
    b"ARROW1": "an Arrow file",
    b"\xff\xff\xff\xff": "an Arrow stream, as datasets.save_to_disk writes it",
}
_BATCH_ROWS = 4096

Record = tuple[str, dict[str, Any]]
"""Location of a row, for example ``train.jsonl:12``, and its columns."""


def read_records(source: str, name: str | None = None) -> Iterator[Record]:
    """Yield ``(location, columns)`` of each row in order, without reading the whole file into memory.

    Every value is one that can be tokenized, sent and written later (``values.check_values``).
    """
    try:
        for location, record in open_source(source, name or name_sources([source])[source]):
            check_values(location, record)
            yield location, record
    except OSError as error:
        raise DataError(
            f"data file {source!r} cannot be read: {error}. Check its permissions, and that its disk is mounted"
        ) from error


def open_source(source: str, name: str) -> Iterator[Record]:
    """Open a source by its name or its first bytes, and yield its rows."""
    if match := _HUB_ADDRESS.match(source):
        raise DataError(f"data file {source!r} is an address of the Hugging Face hub. Write {HUB}{match[1]}")
    if source.startswith(HUB):
        return _numbered(_read_hub(source), name)
    file = Path(source)
    if not file.is_file():
        reason = "is a folder, not a JSONL or Parquet file" if file.is_dir() else "does not exist"
        hint = f". For a data set of the Hugging Face hub write {HUB}{source}" if is_hub_name(source) else ""
        raise DataError(f"data file {source!r} {reason} (looked in {file.resolve().parent}){hint}")
    with file.open("rb") as opened:
        start = opened.read(_START_BYTES)
    if problem := _foreign_format(start) or _TABLES.get(file.suffix.lower(), ""):
        raise DataError(f"data file {source!r} {problem}")
    if _is_parquet(file, start):
        return _numbered(parquet_rows(file), name)
    if start.removeprefix(_BOM).lstrip().startswith(b"["):
        return _numbered(parse_array(str(file), file.read_bytes()), name)
    return _read_jsonl(file, name)


def _numbered(records: Iterable[dict[str, Any]], name: str) -> Iterator[Record]:
    return ((f"{name}:{number}", record) for number, record in enumerate(records, start=1))


def is_columnar(source: str) -> bool:
    """Return True if a source gives each object the fields of all, with null for those that it has not."""
    file = Path(source)
    try:
        with file.open("rb") as opened:
            return _is_parquet(file, opened.read(_START_BYTES))
    except OSError:  # no file, or one whose problem ``read_records`` reports
        return source.startswith(HUB)


def _is_parquet(file: Path, start: bytes) -> bool:
    return file.suffix.lower() == ".parquet" or start.startswith(_PARQUET_MAGIC)


def require(location: str, record: Mapping[str, object], key: str) -> object:
    """Return the value of a column; ``a.b`` is the field ``b`` inside the column ``a``."""
    if key in record:  # also a column whose own name has a dot
        return record[key]
    value: object = record
    for depth, part in enumerate(parts := key.split(".")):
        if not isinstance(value, Mapping) or part not in value:
            inside = f"{'.'.join(parts[:depth])!r}" if depth else "the row"
            available = sorted(value) if isinstance(value, Mapping) else repr(value)
            raise DataError(
                f"{location}: field {key!r} is missing; {inside} has {available}. One key serves all files of "
                "data.train and data.eval"
            )
        value = value[part]
    return value


def _read_jsonl(file: Path, name: str) -> Iterator[Record]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            location = f"{name}:{number}"
            yield location, parse_object(location, line)


_TABLES = {
    **{
        suffix: f"is a {suffix[1:].upper()} table, not a JSONL, JSON or Parquet file. Convert it: "
        f"pandas.read_csv(FILE{separator}).to_json('train.jsonl', orient='records', lines=True)"
        for suffix, separator in ((".csv", ""), (".tsv", ", sep='\\t'"))
    },
    **dict.fromkeys((".yaml", ".yml"), "is YAML, not JSONL, JSON or Parquet. Write each row as JSON on one line"),
}
"""Formats without a magic number, by the ending of the file, and how to convert them."""


def _foreign_format(start: bytes) -> str:
    """Return what a file is instead of rows, by its first bytes, and what to do; empty if it may hold rows."""
    text = start.removeprefix(_BOM).lstrip().lower()
    if text.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the data itself. Run git lfs pull in its repository, or download the file"
    if text.startswith((b"<!doctype", b"<html")):
        return "is a web page, not data; download the raw file"
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "is text in UTF-16; convert it to UTF-8"
    names = (name for magic, name in _BINARY_FORMATS.items() if start.startswith(magic))
    return next((f"is {name}, not a JSONL, JSON or Parquet file; unpack or convert it" for name in names), "")


def parquet_rows(file: Path, batch_rows: int = _BATCH_ROWS) -> Iterator[dict[str, object]]:
    """Yield the rows of a Parquet file."""
    parquet = _optional("pyarrow.parquet", f"{file} is a Parquet file")
    arrow_error = import_module("pyarrow").ArrowException
    number = 0
    try:
        with parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_rows):
                for record in batch.to_pylist():
                    number += 1
                    yield record
    except (arrow_error, OSError, ValueError) as error:  # ValueError: text that is not UTF-8
        raise DataError(
            f"{file}: not readable as Parquet after {number} rows: {error}. Copy the file again, or write it anew"
        ) from error


def _read_hub(source: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of one split. ``datasets`` downloads and caches it and runs no code of the data set."""
    path, _, split = source.removeprefix(HUB).partition(":")
    parts = path.split("/")
    if len(parts) not in (2, 3) or not all(parts):
        raise DataError(f"{source!r} is not a hub name; expected {HUB}owner/name[/configuration][:split]")
    datasets = _optional("datasets", f"{source} is a data set of the Hugging Face hub")
    try:
        loaded = datasets.load_dataset("/".join(parts[:2]), name=parts[2] if parts[2:] else None, split=split or None)
    except Exception as error:  # network, hub, cache and file formats each have errors of their own
        raise DataError(
            f"{source} cannot be loaded: {type(error).__name__}: {error}. Check the name, the network and HF_TOKEN, "
            "or download a file of the data set and give its path"
        ) from error
    if isinstance(loaded, dict):
        if len(loaded) != 1:
            raise DataError(f"{source} has the splits {sorted(loaded)}; choose one: {source}:{sorted(loaded)[0]}")
        loaded = next(iter(loaded.values()))
    for table in loaded.with_format("arrow").iter(_BATCH_ROWS):
        yield from table.to_pylist()


def _optional(module: str, reason: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise DataError(
            f"{reason}, and reading it needs the package {package}: {error}. Install the extra: "
            "pip install 'megatron-dppo[data]'"
        ) from error

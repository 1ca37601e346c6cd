"""Parquet files and data sets of the Hugging Face hub, and the extra that reads them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pytest

from megatron_dppo.data.chat import load_tokenizer
from megatron_dppo.data.prompts import PromptDataset, load_rows
from megatron_dppo.data.sources import read_records
from megatron_dppo.errors import DataError
from megatron_dppo_lab.supervised import SupervisedDataset
from tests.unit.data_files import LAYOUTS, write_jsonl, write_parquet

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(ROOT / "examples/chain_sum/model")


def stream(path: str, tokenizer: Any) -> PromptDataset:
    rows = load_rows(path, "train").rows
    return PromptDataset(rows, tokenizer, max_prompt_tokens=16, max_new_tokens=40, context_length=256, seed=3)


def test_parquet_and_jsonl_give_the_same_stream_that_a_cursor_resumes(tmp_path: Path, tokenizer: Any) -> None:
    rows = LAYOUTS["slime text"]
    jsonl = stream(write_jsonl(tmp_path / "rows.jsonl", rows), tokenizer)
    parquet = stream(write_parquet(tmp_path / "rows.parquet", rows), tokenizer)
    assert [parquet[i].token_ids for i in range(13)] == [jsonl[i].token_ids for i in range(13)]
    second = stream(str(tmp_path / "rows.parquet"), tokenizer)
    assert [second[i] for i in (9, 2, 5)] == [parquet[i] for i in (9, 2, 5)]
    assert jsonl.fingerprint() == parquet.fingerprint() == second.fingerprint()
    changed = stream(write_jsonl(tmp_path / "rows.jsonl", [{**rows[0], "label": "3"}, *rows[1:]]), tokenizer)
    assert changed.fingerprint() != jsonl.fingerprint()


def test_rows_are_numbered_over_all_parts_of_a_parquet_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    rows = pyarrow.Table.from_pylist([{"prompt": f"{i}+1=", "label": i + 1} for i in range(9000)])
    pyarrow.parquet.write_table(rows, path, row_group_size=700)
    records = list(read_records(str(path)))
    assert [place for place, _ in records] == [f"rows.parquet:{i}" for i in range(1, 9001)]
    assert records[8999][1] == {"prompt": "8999+1=", "label": 9000}


def test_parquet_is_detected_by_its_content_and_a_broken_file_is_an_error(tmp_path: Path) -> None:
    write_parquet(tmp_path / "rows.parquet", LAYOUTS["slime text"])
    (tmp_path / "rows.data").write_bytes((tmp_path / "rows.parquet").read_bytes())
    assert len(load_rows(str(tmp_path / "rows.data"), "train").rows) == 4
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and nothing more")
    with pytest.raises(DataError, match=r"broken\.parquet: not readable"):
        load_rows(str(tmp_path / "broken.parquet"), "train")
    pyarrow.parquet.write_table(pyarrow.table({"prompt": [], "label": []}), tmp_path / "empty.parquet")
    with pytest.raises(DataError, match=r"empty\.parquet has no rows"):
        load_rows(str(tmp_path / "empty.parquet"), "train")


def test_supervised_pairs_come_from_parquet_too(tmp_path: Path, tokenizer: Any) -> None:
    path = write_parquet(tmp_path / "pairs.parquet", [{"prompt": "1+1=", "response": "2"}])
    sample = SupervisedDataset(path, tokenizer, seed=0)[0]
    assert sample.labels[sample.loss_mask].tolist() == [*tokenizer("2", add_special_tokens=False).input_ids, 2]


@pytest.mark.parametrize(
    ("source", "module"), [("rows.parquet", "pyarrow"), ("hf:math-ai/aime25", "datasets")], ids=["parquet", "hub"]
)
def test_the_error_of_a_missing_package_has_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, module: str
) -> None:
    write_parquet(tmp_path / "rows.parquet", LAYOUTS["verl"])
    for name in (module, "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as error:
        load_rows(source, "train")
    assert source in str(error.value) and module in str(error.value)
    assert "pip install 'megatron-dppo[data]'" in str(error.value)


class Split:
    """A split as ``datasets`` gives it, as far as the reader uses it."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def with_format(self, name: str) -> Split:
        assert name == "arrow"
        return self

    def iter(self, size: int) -> Any:
        for start in range(0, len(self.rows), 3):
            yield pyarrow.Table.from_pylist(self.rows[start : start + 3])


def fake_hub(monkeypatch: pytest.MonkeyPatch, answer: Any) -> list[tuple[Any, ...]]:
    calls = []

    def load_dataset(path: str, name: str | None, split: str | None) -> Any:
        calls.append((path, name, split))
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return calls


def test_a_hub_name_has_owner_name_configuration_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = LAYOUTS["aime25 of math-ai"]
    calls = fake_hub(monkeypatch, Split(rows))
    for source in ("hf:math-ai/aime25:test", "hf:openai/gsm8k/main:train", "hf:a/b"):
        result = load_rows(source, "eval").rows
        assert [r.location for r in result] == [f"{source}:{i}" for i in range(1, 5)]
        assert [r.label for r in result] == [r["answer"] for r in rows]
    assert calls == [("math-ai/aime25", None, "test"), ("openai/gsm8k", "main", "train"), ("a/b", None, None)]


def test_the_default_split_is_the_only_one_and_several_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Split(LAYOUTS["verl"])
    fake_hub(monkeypatch, {"train": one})
    assert len(load_rows("hf:BytedTsinghua-SIA/DAPO-Math-17k", "train").rows) == 4
    fake_hub(monkeypatch, {"train": one, "test": one})
    with pytest.raises(DataError, match=r"splits \['test', 'train'\]"):
        load_rows("hf:a/b", "train")


def test_the_error_of_a_hub_name_has_the_reason_and_the_alternative(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_hub(monkeypatch, ConnectionError("no network"))
    with pytest.raises(DataError, match=r"hf:a/b .*ConnectionError: no network\. .*HF_TOKEN"):
        load_rows("hf:a/b", "train")
    for bad in ("hf:aime", "hf:/x", "hf:a/b/c/d"):
        with pytest.raises(DataError, match=r"a hub name; expected hf:owner/name\[/configuration\]\[:split\]"):
            load_rows(bad, "train")
    with pytest.raises(DataError, match="'math-ai/aime25'"):
        load_rows("math-ai/aime25", "train")


def test_the_real_library_reads_a_data_set_laid_out_as_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "owner/name").mkdir(parents=True)
    write_parquet(tmp_path / "owner/name/train-00000-of-00001.parquet", LAYOUTS["verl"])
    write_jsonl(tmp_path / "owner/name/test.jsonl", LAYOUTS["verl"][:1])
    file = load_rows("owner/name/train-00000-of-00001.parquet", "train").rows
    (tmp_path / "owner/name/test.jsonl").unlink()
    for source in ("hf:owner/name", "hf:owner/name:train"):
        rows = load_rows(source, "train").rows
        assert [(r.prompt, r.label, r.metadata) for r in rows] == [(r.prompt, r.label, r.metadata) for r in file]
    with pytest.raises(DataError, match="Unknown split"):
        load_rows("hf:owner/name:validation", "train")


def test_the_example_files_hold_real_problems_that_are_held_out_from_each_other() -> None:
    folder = ROOT / "examples/data"
    train = load_rows(str(folder / "champ_train.jsonl"), "train")
    held_out = load_rows(str(folder / "champ_eval.parquet"), "eval")
    assert (len(train.rows), len(held_out.rows)) == (train.num_read, held_out.num_read) == (60, 19)
    texts = [r.prompt[0]["content"] for r in train.rows + held_out.rows if isinstance(r.prompt, list)]
    assert len(set(texts)) == 79 and all(int(r.label) is not None for r in train.rows + held_out.rows)
    assert all(file.stat().st_size < 60_000 for file in folder.iterdir())

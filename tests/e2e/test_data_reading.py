"""Ranks that open the data files of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import flags, records, train
from tests.unit.data_files import write_jsonl

pytestmark = pytest.mark.e2e

GUARD = """
import os, pathlib, sys

def refuse(event, args):
    if event == "open" and isinstance(args[0], (str, os.PathLike)) and os.fspath(args[0]).endswith(".jsonl.data"):
        raise PermissionError("only rank 0 opens data")

if os.environ.get("RANK", "0") != "0":
    sys.addaudithook(refuse)
    pathlib.Path(__file__).with_name("guarded").touch()
"""


@pytest.mark.long
def test_rank_0_alone_opens_the_data_and_tells_what_is_wrong_with_them(tmp_path: Path) -> None:
    """Python starts with a hook that lets no other rank open a data file, whatever opens it."""
    (tmp_path / "sitecustomize.py").write_text(GUARD)
    rows = [{"prompt": f"{i}+{j}-1=", "label": i + j - 1} for i in range(1, 9) for j in range(1, 9)]
    data = {
        "data__train": write_jsonl(tmp_path / "train.jsonl.data", rows[8:]),
        "data__eval": write_jsonl(tmp_path / "eval.jsonl.data", rows[:8]),
    }
    small = flags(
        run__num_steps=1,
        rollout__prompts_per_step=4,
        rollout__samples_per_prompt=4,
        log__tensorboard="false",
    )
    done = train([*small, *flags(run__output_dir=tmp_path / "run", **data)], processes=2, extra_path=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "guarded").exists(), "nothing kept the other rank from the files, so this would prove nothing"
    assert done.stdout.count("data     train: 56 prompts; from ") == 1
    assert [r["step"] for r in records(tmp_path / "run")][-1] == 1

    odd = write_jsonl(tmp_path / "odd.jsonl.data", [*rows[:2], {"prompt": "1+1="}])
    wrong = [*small, *flags(run__output_dir=tmp_path / "wrong", **data | {"data__train": odd})]
    refused = train(wrong, processes=2, extra_path=tmp_path)
    assert refused.returncode != 0 and "Traceback" not in refused.stdout
    assert refused.stderr.count("\nerror: odd.jsonl.data:3: field 'label' is missing") == 1
    assert refused.stderr.count("odd.jsonl.data:3") == 1 and "[rank 1]" not in refused.stderr
    assert not (tmp_path / "wrong").exists()

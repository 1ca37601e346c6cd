"""The losses on the layouts: the whole objective equals the float64 reference of one process.

Each layout takes another part of the losses, from a seventh to a fifteenth. On one process and on two all are there, on
four a third of them: what a loss sees of four ranks it sees of two. ``make test-matrix`` takes all.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.layouts import LAYOUTS
from tests.distributed.objective import divide_variants, dropped_shares, run, write_references
from tests.distributed.spawn import run_distributed

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(("processes", "every"), [(1, 7), (2, 14), (4, 15)])
def test_losses_on_layouts(processes: int, every: int, tmp_path: Path) -> None:
    work = divide_variants(LAYOUTS[processes], every)
    run_distributed(run, processes, work, write_references(tmp_path, work), timeout=600.0)


def test_the_variants_do_drop_tokens() -> None:
    dropped = dropped_shares()
    kept_all = {name for name, share in dropped.items() if not share}
    everything = {"pg_is", "sapo", "cispo", "drpo", "drpo/centered", "score_centering", "own/centered"}
    everything |= {"own/penalised", "spo", "vespo"}
    assert kept_all == everything, "a mask that drops nothing tests nothing"
    assert dropped["dppo_topk_tv/predictive"] != dropped["dppo_topk_tv"], "a direction that changes nothing"

"""The losses on the layouts: the whole objective equals the float64 reference of one process.

Each layout takes another part of the losses. On two processes all are there, an eighth of them on families with linear
attention: a loss sees nothing of the layers. On one process a third is there, on four a tenth. ``make test-matrix``
takes all, ``make test-long`` all of linear attention.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.distributed.families import LINEAR
from tests.distributed.layouts import LAYOUTS, LINEAR_LAYOUTS
from tests.distributed.objective import VARIANTS, divide_variants, dropped_shares, run, write_references
from tests.distributed.spawn import run_distributed
from tests.distributed.test_families import EXPERTS, whole_grid

pytestmark = pytest.mark.distributed
EVERY = list(VARIANTS)
LINEAR_VARIANTS = {1: EVERY[::16], 2: EVERY[4::8], 4: EVERY[1::25]}
"""By number of processes: the losses on families with linear attention."""
OTHER_VARIANTS = {1: EVERY[1::3], 2: [name for name in EVERY if name not in LINEAR_VARIANTS[2]], 4: EVERY[4::10]}
"""The same on other families."""


@pytest.mark.parametrize("processes", sorted(LINEAR_VARIANTS))
def test_losses_on_layouts(processes: int, tmp_path: Path) -> None:
    work = divide_variants(LAYOUTS[processes], OTHER_VARIANTS[processes])
    work += divide_variants(LINEAR_LAYOUTS[processes], LINEAR_VARIANTS[processes])
    run_distributed(run, processes, work, write_references(tmp_path, work), timeout=600.0)


@pytest.mark.long
@pytest.mark.parametrize("processes", sorted(EXPERTS))
def test_every_loss_on_every_layout_of_linear_attention(processes: int, tmp_path: Path) -> None:
    cases = [replace(case, tied=False) for case in whole_grid(processes) if case.family in LINEAR]
    work = [(case, EVERY) for case in cases]
    run_distributed(run, processes, work, write_references(tmp_path, work), timeout=7200.0)


def test_the_variants_do_drop_tokens() -> None:
    dropped = dropped_shares()
    kept_all = {name for name, share in dropped.items() if not share}
    everything = {"pg_is", "sapo", "cispo", "drpo", "drpo/centered", "score_centering", "own/centered"}
    everything |= {"own/penalised", "spo", "vespo"}
    assert kept_all == everything, "a mask that drops nothing tests nothing"
    assert dropped["dppo_topk_tv/predictive"] != dropped["dppo_topk_tv"], "a direction that changes nothing"

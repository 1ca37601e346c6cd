"""Write the tables of docs/models.md from the families' files and from the cases of the tests.

python tools/write_models_doc.py docs/models.md

A cell says what a test shows; a dash means that the model has no such part, "not tested" that no test has it.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from megatron_dppo.config.layout import ModelShape  # noqa: E402
from megatron_dppo.hf.families import FAMILIES, Family, adapter_modules  # noqa: E402
from megatron_dppo.hf.folder import model_shape  # noqa: E402
from tests.distributed import layouts, test_families, test_lora, test_router_replay  # noqa: E402
from tests.distributed.families import family_config  # noqa: E402
from tests.distributed.parity import case_family  # noqa: E402
from tests.engines.test_adapters import ADAPTED  # noqa: E402
from tests.engines.test_families import SERVED, STOPPED  # noqa: E402

BEGIN, END = "<!-- written by tools/write_models_doc.py -->", "<!-- end -->"
ENGINES = {"sglang": "SGLang", "vllm": "vLLM"}
UNTESTED = "not tested"


def tested_layouts(family: Family, _: ModelShape) -> str:
    """Return the number of layouts of the whole grid, and of those that CI takes."""
    names = (family.model_type, *family.variants)
    grid = [case for processes in test_families.SAMPLED for case in test_families.whole_grid(processes)]
    # 8 processes run in the matrix only.
    matrix = [case for processes, cases in layouts.LAYOUTS.items() if processes < 8 for case in cases]
    matrix += [case for cases in layouts.LINEAR_LAYOUTS.values() for case in cases]
    sampled = [case for cases in test_families.SAMPLED.values() for case in cases] + matrix
    every, few = (sum(case_family(case) in names for case in cases) for cases in (grid, sampled))
    return f"{every} (CI: {few})"


def lora(family: Family, shape: ModelShape) -> str:
    """Return whether adapters are equal to PEFT's, and on which modules."""
    grids = (test_lora.CASES, test_lora.FURTHER)
    cases = [(case, targets) for grid in grids for cases in grid.values() for case, targets in cases]
    modules = {name for case, targets in cases if case_family(case) == family.model_type for name in targets}
    if not modules:
        return UNTESTED
    return "all layers" if modules >= set(adapter_modules(shape)) else "attention"


def replay(family: Family, shape: ModelShape) -> str:
    """Return whether routes are replayed: R2 and R3, with combine weights (+w)."""
    if shape.num_experts is None:
        return "-"
    plain, weighted = (
        any(case_family(case) == family.model_type for cases in grid.values() for case in cases)
        for grid in (test_router_replay.LAYOUTS, test_router_replay.WEIGHTED)
    )
    return "experts, weights" if plain and weighted else "experts" if plain else "weights" if weighted else UNTESTED


def servers(family: Family, _: ModelShape) -> str:
    """Return the engines that a test starts with a model of the family."""
    names = {family.model_type, *family.variants}
    served = [title for engine, title in ENGINES.items() if names & set(SERVED[engine])]
    stopped = [title for engine, title in ENGINES.items() if family.model_type in STOPPED[engine]]
    cells = [", ".join(served), f"[not {', '.join(stopped)}](results/models.md#servers-on-a-cpu)" if stopped else ""]
    return "; ".join(filter(None, cells)) or UNTESTED


def served_adapters(family: Family, _: ModelShape) -> str:
    """Return the engines that a test sends adapters of the family."""
    return ", ".join(title for engine, title in ENGINES.items() if family.model_type in ADAPTED[engine]) or UNTESTED


def sizes(family: Family, _: ModelShape) -> str:
    """Return the published models whose weight names and number of weights are compared."""
    return ", ".join(f"{model.name} ({model.billions:g} B)" for model in family.published) or UNTESTED


def recipes(family: Family, _: ModelShape) -> str:
    """Return links to the configurations."""
    return ", ".join(f"[{path}](../examples/{path})" for path in family.recipes) or "-"


def quantized(family: Family, _: ModelShape) -> str:
    """Return whether folders in FP8 and INT4 are written."""
    return "refused" if family.fused_experts.is_interleaved else "names"


Cell = Callable[[Family, ModelShape], str]
COLUMNS: tuple[tuple[str, str, Cell], ...] = (
    ("layouts", "tests/distributed/test_families.py", tested_layouts),
    ("LoRA", "tests/distributed/test_lora.py", lora),
    ("router replay", "tests/distributed/test_router_replay.py", replay),
    ("FP8 and INT4 rollouts", "tests/unit/export/test_quantization.py", quantized),
    ("servers", "tests/engines/test_families.py", servers),
    ("LoRA on servers", "tests/engines/test_adapters.py", served_adapters),
    ("published sizes", "tests/unit/hf/test_families.py", sizes),
    ("recipes", "tests/unit/test_examples.py", recipes),
)
"""Title, test and cell of each column."""


def table(rows: Iterator[list[str]]) -> list[str]:
    """Return the lines of a table; the first row is its head."""
    head, *body = rows
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body)]


def families_table() -> Iterator[list[str]]:
    """Yield the rows that say what a family is."""
    yield ["`model_type`", "Hugging Face class", "models", "of its own"]
    for name, family in FAMILIES.items():
        yield [f"`{name}`", family.hf_class, family.models, family.features]


def tests_table() -> Iterator[list[str]]:
    """Yield the rows that say what is tested."""
    yield ["", *(title for title, _, _ in COLUMNS)]
    for name, family in FAMILIES.items():
        shape = model_shape(family_config(name))
        yield [f"`{name}`", *(cell(family, shape) for _, _, cell in COLUMNS)]
    yield ["**test**", *(f"`{test}`" for _, test, _ in COLUMNS)]


def document(text: str) -> str:
    """Return the page with both tables written anew."""
    tables = iter([table(families_table()), table(tests_table())])
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    return pattern.sub(lambda _: "\n".join([BEGIN, "", *next(tables), "", END]), text)


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    page = parser.parse_args().page
    page.write_text(document(page.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()

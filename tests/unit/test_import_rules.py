"""The table of rooms (docs: which part of the package may import which) and the sizes of files and functions."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "megatron_dppo"
# vLLM's workers load what is in that folder, as modules of their own; the package imports the digests alone.
FILES = sorted(file for file in PACKAGE.rglob("*.py") if file.parent.name != "vllm_extension")

_LOWER = {"config", "errors", "layout", "hf", "parallel", "platform", "types"}
_TORCH_DISTRIBUTED = {
    "parallel",
    "mcore",
    "metrics",
    "trainer",
    "session",
    "session_state",
    "run",
    "resume",
    "evaluation",
    "stop_signal",
    "conversion",
    "update",
    "weight_sync",
    "weights",
    "engines",
}
ROOMS: dict[str, tuple[set[str], set[str]]] = {
    # room: (our rooms, packages from elsewhere)
    "errors": (set(), set()),
    "atomic_files": (set(), set()),
    "problems": ({"errors"}, set()),
    "disk": ({"errors"}, set()),
    "hf_weights": ({"errors", "hf"}, {"torch", "safetensors"}),
    "types": (set(), {"torch"}),
    "config_section": (set(), {"pydantic"}),
    "config_loss": ({"config_section"}, {"pydantic"}),
    "config_servers": ({"config_section"}, {"pydantic"}),
    "config_data": ({"config_section", "config_servers"}, {"pydantic"}),
    "config": ({"config_data", "config_loss", "config_section", "config_servers"}, {"pydantic"}),
    "platform": ({"errors"}, {"torch"}),
    "config_io": ({"config", "errors"}, {"pydantic", "pydantic_core", "tomli_w"}),
    "layout": ({"config", "errors"}, set()),
    "hf": ({"atomic_files", "errors", "layout", "types"}, {"torch", "safetensors", "transformers"}),
    "metrics": ({"atomic_files", "errors", "problems", "types"}, {"torch", "wandb"}),
    "losses": ({"types", "config"}, {"torch"}),
    "parallel": ({"types"}, {"torch", "triton"}),
    "data": ({"errors", "types"}, {"torch", "numpy", "transformers", "pyarrow", "datasets", "reasoning_gym"}),
    "rewards": ({"config", "errors", "types"}, {"numpy", "math_verify", "reasoning_gym"}),
    "rollout": (
        {"types", "errors", "data", "rewards", "hf"},
        {"aiohttp", "numpy", "torch", "transformers", "safetensors"},
    ),
    "report": ({"metrics"}, {"matplotlib", "tqdm"}),
    "mcore": (_LOWER | {"atomic_files", "disk", "losses", "problems"}, {"torch", "megatron", "transformer_engine"}),
    "trainer": (_LOWER | {"data", "losses", "mcore", "metrics"}, {"torch"}),
    "update": ({"clock", "config", "data", "losses", "parallel", "trainer", "types"}, {"torch"}),
    "warmup": (
        {"atomic_files", "clock", "config", "data", "errors", "losses", "mcore", "parallel", "stop_signal", "trainer"},
        set(),
    ),
    "inputs": ({"config", "data", "errors", "hf", "hf_weights", "layout", "problems"}, set()),
    "prefetch": ({"clock", "config", "rollout", "types"}, {"torch"}),
    "weight_digests": ({"rollout", "serving"}, {"torch"}),
    "weight_judge": ({"rollout", "weight_digests"}, set()),
    "weight_proof": ({"rollout", "weight_digests", "weight_judge"}, {"torch"}),
    "weight_sync": ({"config", "disk", "errors", "hf", "parallel", "rollout", "weight_proof"}, {"torch"}),
    "weights": (
        {"config", "data", "errors", "inputs", "parallel", "rollout", "trainer", "types", "weight_sync"},
        {"torch"},
    ),
    "publish": (
        {"config", "errors", "hf", "inputs", "parallel", "rollout", "trainer", "weight_sync", "weights"},
        set(),
    ),
    "engines": (
        {"config", "inputs", "parallel", "platform", "publish", "rollout", "serving", "trainer", "weight_sync"},
        {"torch"},
    ),
    "carried": ({"types"}, set()),
    "fastest": ({"carried", "clock", "parallel", "rollout", "session", "types"}, set()),
    "session": (
        _LOWER
        | {"carried", "disk", "engines", "inputs", "mcore", "metrics", "prefetch", "publish", "report", "resume"}
        | {"rewards", "rollout", "run", "stop_signal", "trainer", "warmup"},
        {"torch"},
    ),
    "session_state": ({"disk", "mcore", "metrics", "parallel", "prefetch", "resume", "run", "session"}, {"torch"}),
    "run": (
        {"atomic_files", "clock", "config", "config_io", "disk", "engines", "errors", "hf", "inputs", "mcore"}
        | {"metrics", "parallel", "platform", "problems", "rewards", "serving", "trainer", "types"},
        {"numpy", "torch"},
    ),
    "resume": ({"config", "errors", "hf", "inputs", "mcore", "parallel", "run"}, {"torch"}),
    "stop_signal": (set(), {"torch"}),
    "clock": (set(), set()),
    "evaluation": ({"atomic_files", "clock", "disk", "metrics", "parallel", "rollout", "session", "types"}, {"torch"}),
    "sampling": ({"carried", "clock", "evaluation", "fastest", "parallel", "prefetch", "session", "types"}, set()),
    "logbook": (
        {"clock", "disk", "evaluation", "parallel", "platform", "report", "rollout", "run", "sampling", "session"}
        | {"types"},
        set(),
    ),
    "loop": (
        {"config", "data", "errors", "hf", "losses", "rollout", "types"}
        | {"clock", "evaluation", "logbook", "report", "run", "sampling", "session", "session_state", "stop_signal"}
        | {"update"},
        {"torch"},
    ),
    "conversion": (_LOWER | {"data", "mcore"}, {"torch", "transformers"}),
    "serving": ({"config", "errors"}, set()),
    "cli": ({"config", "config_io", "errors", "layout", "loop", "problems", "resume", "run", "serving"}, set()),
    "train": ({"cli"}, set()),
}

TRITON = ("row_kernels_triton", "triton_kernels")
"""the modules of ``parallel`` that need Triton"""


def room_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(source: str) -> Iterator[str]:
    """Every imported name at any nesting level: ``a.b`` for ``import a.b``, ``a.b.c`` for ``from a.b import c``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative imports hide the room"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            first = node.args[0]
            if isinstance(first, ast.Constant):
                yield str(first.value)


def forbidden(room: str, source: str) -> list[str]:
    """What a file of the room imports against the table."""
    ours, theirs = ROOMS[room]
    wrong = []
    for name in imports(source):
        top, _, rest = name.partition(".")
        if top == "megatron_dppo":
            allowed = rest.split(".")[0] in {*ours, room}
        else:
            allowed = top in theirs or top in sys.stdlib_module_names
        if name.startswith("torch.distributed") and room not in _TORCH_DISTRIBUTED:
            allowed = False
        if not allowed:
            wrong.append(name)
    if room not in _TORCH_DISTRIBUTED:
        attributes = {ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
        wrong += sorted(attributes & {"torch.distributed"})
    return wrong


def test_the_reader_of_imports_finds_each_form_of_a_forbidden_import() -> None:
    for room, source in (
        ("losses", "def f():\n    if True:\n        from torch import distributed"),
        ("losses", "import torch\ntorch.distributed.get_rank()"),
        ("losses", "import torch.distributed as dist"),
        ("losses", "from megatron_dppo.errors import UserError"),
        ("losses", "from megatron_dppo import parallel"),
        ("trainer", "class A:\n    def f(self):\n        import megatron.core"),
        ("rollout", "from megatron_dppo.mcore.bridge import Bridge"),
        ("rollout", "import importlib\nimportlib.import_module('sglang.srt')"),
        ("rollout", "try:\n    import vllm\nexcept ImportError:\n    pass"),
        ("mcore", "from megatron_dppo.rollout import engine"),
        ("types", "from megatron_dppo.config import Config"),
    ):
        assert forbidden(room, source), source
    assert not forbidden("mcore", "from megatron.core import parallel_state\nimport torch.distributed as dist")


def test_every_room_is_in_the_table_and_the_table_has_no_others() -> None:
    assert {room_of(file) for file in FILES} - {"__init__"} == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_the_table_allows(room: str) -> None:
    wrong = {str(f): forbidden(room, f.read_text()) for f in FILES if room_of(f) == room}
    assert not {name: found for name, found in wrong.items() if found}


def test_only_mcore_imports_megatron_and_nobody_imports_an_engine() -> None:
    tops = {file: {name.split(".")[0] for name in imports(file.read_text())} for file in FILES}
    assert {room_of(file) for file, names in tops.items() if "megatron" in names} == {"mcore"}
    assert not [str(file) for file, names in tops.items() if names & {"sglang", "vllm"}]


def test_triton_is_imported_by_its_kernels_alone_and_those_only_when_they_are_called() -> None:
    """Triton is there where torch has CUDA, or for tests; everything else works without it."""
    tops = {file.stem: {name.split(".")[0] for name in imports(file.read_text())} for file in FILES}
    assert {name for name, names in tops.items() if "triton" in names} == {"triton_kernels"}
    for file in FILES:
        at_import = {
            module
            for node in ast.parse(file.read_text()).body
            if isinstance(node, ast.ImportFrom)
            for module in (node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names))
        }
        if file.stem != "row_kernels_triton":
            assert not {f"megatron_dppo.parallel.{name}" for name in TRITON} & at_import, file


def test_no_rooms_import_each_other_in_a_circle() -> None:
    left = {room: set(ours) for room, (ours, _) in ROOMS.items()}
    while left:
        free = [room for room, ours in left.items() if not ours & left.keys()]
        assert free, f"a circle among {sorted(left)}"
        for room in free:
            del left[room]


def rooms_without_megatron() -> list[str]:
    """Modules of the rooms from which no chain of top-level imports leads to mcore, by the files as they are."""
    reach = {room: set[str]() for room in ROOMS}
    for file in FILES:
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron_dppo."):
                reach.get(room_of(file), set()).add((node.module or "").split(".")[1])
    heavy = {"mcore"}
    while more := {room for room, used in reach.items() if used & heavy} - heavy:
        heavy |= more
    light = [file for file in FILES if room_of(file) not in {*heavy, "__init__", "train"} and file.stem not in TRITON]
    return [".".join(("megatron_dppo", *f.relative_to(PACKAGE).with_suffix("").parts)) for f in light]


@pytest.mark.parametrize("modules", [["megatron_dppo"], rooms_without_megatron()], ids=["package", "light rooms"])
def test_importing_them_loads_neither_megatron_nor_cuda(modules: list[str]) -> None:
    program = (
        f"import importlib, sys\nfor name in {modules!r}:\n    importlib.import_module(name)\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('megatron', 'transformer_engine', 'sglang', 'vllm')])\n"
        "print('torch' in sys.modules and sys.modules['torch'].cuda.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[]", "False"]


def test_the_rooms_that_load_without_megatron_are_those_that_the_table_promises() -> None:
    rooms = {name.split(".")[1] for name in rooms_without_megatron()}
    promised = {"types", "config", "config_io", "platform", "errors", "layout", "hf", "metrics", "losses", "parallel"}
    assert promised | {"data", "rewards", "rollout", "report", "cli", "serving"} <= rooms


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_files_have_at_most_300_lines_and_functions_60(file: Path) -> None:
    source = file.read_text()
    lines = source.count("\n")
    assert lines <= 300
    lengths = {
        node.name: (node.end_lineno or 0) - node.lineno + 1
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert not {name: length for name, length in lengths.items() if length > 60}

"""The table of rooms (docs: which part of the package may import which) and the sizes of files and functions."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "megatron_dppo"
# Servers load what is in those folders, as modules of their own; the package imports digests and patches alone.
FILES = sorted(file for file in PACKAGE.rglob("*.py") if not file.parent.name.endswith("_extension"))

_TORCH_DISTRIBUTED = {
    "doctor",
    "parallel",
    "head",
    "report",
    "mcore",
    "supervision",
    "policy",
    "plan",
    "weights",
    "run",
    "replay",
}
ROOMS: dict[str, tuple[set[str], set[str]]] = {
    # room: (our rooms, packages from elsewhere); a room stands above all that it imports
    "errors": (set(), set()),
    "types": (set(), {"torch"}),
    "parallel": (set(), {"torch", "numpy"}),
    "files": ({"errors"}, set()),
    "platform": ({"errors"}, {"torch"}),
    "functions": ({"errors"}, set()),
    "config": ({"errors", "functions"}, {"pydantic", "pydantic_core", "tomli_w"}),
    "head": ({"parallel", "types"}, {"torch", "triton"}),
    "data": (
        {"errors", "types"},
        {"torch", "numpy", "transformers", "tokenizers", "pyarrow", "datasets", "reasoning_gym"},
    ),
    "losses": ({"config", "errors", "functions", "types"}, {"torch"}),
    "report": ({"errors", "files", "types"}, {"torch", "wandb", "matplotlib", "rich", "accelerate"}),
    "rewards": (
        {"config", "errors", "functions", "types"},
        {"aiohttp", "math_verify", "numpy", "reasoning_gym", "transformers"},
    ),
    "record": ({"errors", "files", "types"}, {"numpy", "torch", "pyarrow"}),
    "page": ({"errors", "files", "record", "report"}, {"numpy"}),
    "serving": ({"config", "errors"}, set()),
    "families": ({"config", "errors"}, {"torch"}),
    "hf": ({"config", "errors", "families", "files", "types"}, {"torch", "safetensors", "transformers"}),
    "supervision": ({"config", "errors", "report"}, {"torch"}),
    "rollout": (
        {"data", "errors", "functions", "hf", "rewards", "types"},
        {"aiohttp", "modelopt", "numpy", "orjson", "pybase64", "torch", "transformers", "safetensors"},
    ),
    "agents": ({"config", "errors", "functions", "rollout", "types"}, {"aiohttp"}),
    "mcore": (
        {"config", "errors", "families", "files", "head", "hf", "losses", "parallel", "platform", "types"},
        {"torch", "megatron", "transformer_engine"},
    ),
    "policy": (
        {
            "config",
            "data",
            "errors",
            "families",
            "files",
            "head",
            "hf",
            "losses",
            "mcore",
            "parallel",
            "platform",
            "report",
            "types",
        }
        | {"supervision"},
        {"torch"},
    ),
    "plan": (
        {"config", "data", "errors", "families", "head", "hf", "losses", "mcore", "platform", "policy", "types"}
        | {"record"},
        {"torch", "transformers"},
    ),
    "weights": (
        {"config", "data", "errors", "families", "files", "hf", "mcore", "parallel", "platform", "policy", "rollout"}
        | {"serving", "types"},
        {"modelopt", "safetensors", "torch", "transformers"},
    ),
    "run": (
        {
            "agents",
            "config",
            "data",
            "errors",
            "families",
            "files",
            "hf",
            "losses",
            "mcore",
            "parallel",
            "platform",
            "policy",
        }
        | {"record", "report", "rewards", "rollout", "serving", "supervision", "types", "weights"},
        {"numpy", "torch", "safetensors"},
    ),
    "doctor": (
        {"config", "data", "errors", "head", "hf", "losses", "mcore", "parallel", "platform", "policy", "rollout"}
        | {"serving", "types", "weights"},
        {"torch", "transformers"},
    ),
    "experiments": (
        {"config", "data", "errors", "files", "hf", "losses", "platform", "report", "rewards", "rollout", "run"}
        | {"supervision", "types"},
        {"torch", "matplotlib", "pydantic", "transformers"},
    ),
    "diagnose": (
        {"config", "data", "errors", "hf", "mcore", "parallel", "platform", "policy", "report", "rollout"}
        | {"run", "supervision", "types"},
        {"numpy", "pyarrow", "torch"},
    ),
    "replay": (
        {"config", "errors", "mcore", "parallel", "platform", "policy", "record", "report", "rollout", "run", "types"},
        {"torch"},
    ),
    "port": ({"config", "errors"}, {"tomli_w", "tree_sitter", "tree_sitter_bash", "yaml"}),
    "cli": (
        {
            "__version__",
            "config",
            "data",
            "diagnose",
            "doctor",
            "errors",
            "experiments",
            "files",
            "page",
            "plan",
            "platform",
            "record",
            "replay",
            "port",
            "run",
            "serving",
            "supervision",
            "weights",
        },
        set(),
    ),
    "train": ({"cli"}, set()),
}

TRITON = ("row_kernels_triton", "triton_kernels")
"""the modules of ``head`` that need Triton"""


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
        ("losses", "from megatron_dppo.platform import Platform"),
        ("losses", "from megatron_dppo import parallel"),
        ("policy", "class A:\n    def f(self):\n        import megatron.core"),
        ("rollout", "from megatron_dppo.mcore.bridge import Bridge"),
        ("rollout", "import importlib\nimportlib.import_module('sglang.srt')"),
        ("rollout", "try:\n    import vllm\nexcept ImportError:\n    pass"),
        ("mcore", "from megatron_dppo.rollout import engine"),
        ("types", "from megatron_dppo.config.schema import Config"),
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
            assert not {f"megatron_dppo.head.{name}" for name in TRITON} & at_import, file


def test_no_rooms_import_each_other_in_a_circle() -> None:
    left = {room: ours & ROOMS.keys() for room, (ours, _) in ROOMS.items()}
    while left:
        free = [room for room, ours in left.items() if not ours & left.keys()]
        assert free, f"a circle among {sorted(left)}"
        for room in free:
            del left[room]


def name_of(file: Path) -> str:
    return ".".join(("megatron_dppo", *file.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


def modules_without_megatron() -> list[str]:
    """Modules from which no chain of top-level imports leads to mcore, by the files as they are."""
    known = {name_of(file) for file in FILES}
    reach = {name: set[str]() for name in known}
    for file in FILES:
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron_dppo"):
                found = {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
                reach[name_of(file)] |= found & known
    heavy = {name for name in known if name.startswith("megatron_dppo.mcore")}
    while more := {name for name, used in reach.items() if used & heavy} - heavy:
        heavy |= more
    return sorted(name for name in known - heavy if name.split(".")[-1] not in (*TRITON, "train"))


@pytest.mark.parametrize("modules", [["megatron_dppo"], modules_without_megatron()], ids=["package", "light modules"])
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
    light = set(modules_without_megatron())
    heavy = {room_of(file) for file in FILES if name_of(file) not in light and file.stem not in (*TRITON, "train")}
    assert heavy == {"diagnose", "doctor", "mcore", "plan", "policy", "replay", "run"}
    assert {"megatron_dppo.weights.publish", "megatron_dppo.weights.sync", "megatron_dppo.run.engines"} <= light


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_functions_have_at_most_60_lines(file: Path) -> None:
    source = file.read_text()
    lengths = {
        node.name: (node.end_lineno or 0) - node.lineno + 1
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert not {name: length for name, length in lengths.items() if length > 60}

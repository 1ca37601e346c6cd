"""The table of packages: which may import which."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import measure_structure
from source_folders import PACKAGES as BESIDE
from source_folders import PYTHON_FILES, TRAINER

# Servers load what is in those folders, as modules of their own; the package imports digests and patches alone.
ELSEWHERE = ("vllm_extension", "verifiers_program.py")
"""run by the Python of another package, which is not installed beside the trainer"""
FILES = sorted(file for file in PYTHON_FILES if not {*ELSEWHERE} & {*file.parts})

_TORCH_DISTRIBUTED = {
    "parallel",
    "head",
    "report",
    "mcore",
    "policy",
    "export",
    "weights",
    "process",
    "setup",
    "run",
    "commands",
}
_TORCH_DISTRIBUTED |= {f"megatron_dppo_{name}" for name in ("convert", "doctor", "lab", "megatron_cpu", "plan")}
"""Packages that talk between ranks."""
ANSWERS = "megatron_dppo_answers"
CONVERSATIONS = "megatron_dppo_conversations"
ENGINES = "megatron_dppo_engines"
MEGATRON_CPU = "megatron_dppo_megatron_cpu"
BASE = {"errors", "files", "source_names", "functions", "config", "hf"}
CORE = {"types", "advantages", "losses", "head", "parallel", "mcore", "policy"}
WINGS = {"rollout", "engines", "export", "weights", "rewards", "data", "report"}
ALL = BASE | CORE | WINGS | {"process", "setup", "run", "commands", "__version__", CONVERSATIONS, ENGINES, MEGATRON_CPU}
PACKAGES: dict[str, tuple[set[str], set[str]]] = {
    # package: (packages of ours, packages from elsewhere); a package stands above all that it imports
    "errors": ({ENGINES}, set()),
    "types": ({CONVERSATIONS, ENGINES}, {"torch"}),
    "files": ({"errors"}, set()),
    "source_names": (set(), set()),
    "functions": ({"errors"}, set()),
    "parallel": ({"errors"}, {"torch", "numpy"}),
    "config": ({"errors", "files", "functions", "source_names", ENGINES}, {"pydantic", "pydantic_core", "tomli_w"}),
    "hf": ({"config", "errors", "files", "types", ENGINES}, {"torch", "safetensors", "transformers"}),
    "advantages": ({"config", "errors", "functions", "types"}, {"torch"}),
    "losses": ({"config", "errors", "functions", "types"}, {"pydantic", "torch"}),
    "public": ({"config", "losses", "types"}, {"torch"}),
    "head": ({"types"}, {"torch", "triton"}),
    "data": (
        {"errors", "files", "functions", "source_names", "types", CONVERSATIONS, ENGINES},
        {"torch", "numpy", "transformers", "tokenizers", "pyarrow", "datasets", "jinja2"},
    ),
    "report": (
        {"config", "errors", "files", "parallel", "types"},
        {"torch", "numpy", "wandb", "comet_ml", "matplotlib", "rich", "accelerate", "pyarrow"},
    ),
    "rewards": (
        {"config", "data", "errors", "functions", ANSWERS, CONVERSATIONS},
        {"aiohttp", "numpy", "transformers"},
    ),
    "mcore": (
        {"config", "errors", "files", "head", "hf", "losses", "parallel", "types", MEGATRON_CPU},
        {"torch", "megatron", "transformer_engine", "fla"},
    ),
    "rollout": (
        {
            *("config", "data", "errors", "functions", "parallel", "report", "rewards", "types"),
            *(ANSWERS, CONVERSATIONS, ENGINES),
        },
        {"numpy", "safetensors", "torch"},
    ),
    "policy": ({"config", "data", "head", "hf", "losses", "mcore", "parallel", "report", "types", ENGINES}, {"torch"}),
    "engines": (
        {"config", "errors", "hf", "report", "rollout", "types", ENGINES},
        {"aiohttp", "numpy", "torch", "transformers"},
    ),
    "export": (
        {"config", "errors", "files", "hf", "parallel", ENGINES},
        {"modelopt", "safetensors", "torch", "transformers"},
    ),
    "weights": (
        {"config", "data", "engines", "errors", "export", "files", "hf", "parallel", "policy", "types", ENGINES},
        {"numpy", "torch"},
    ),
    "process": ({"config", "errors", "files", "mcore", "report"}, {"torch"}),
    "setup": (
        BASE | {"losses", "types", "parallel", "mcore", "policy", "process"} | WINGS | {CONVERSATIONS, ENGINES},
        {"torch"},
    ),
    "run": (
        BASE | CORE - {"head"} | WINGS | {"process", "setup", ANSWERS, ENGINES},
        {"safetensors", "torch", "transformers"},
    ),
    "commands": (BASE | CORE | WINGS | {"process", "setup", "run", "__version__", ENGINES}, {"torch", "transformers"}),
    "train": ({"commands"}, set()),
    # Packages beside the trainer. Libraries, of which the first four lie below the trainer:
    ANSWERS: (set(), {"sympy"}),
    CONVERSATIONS: (set(), set()),
    ENGINES: (set(), {"aiohttp", "numpy", "orjson", "pybase64", "safetensors", "torch"}),
    MEGATRON_CPU: (set(), {"megatron", "numpy", "torch"}),
    "megatron_dppo_port": (
        {"config", "errors", "files", "report", "source_names"},
        {"tomli_w", "tree_sitter", "tree_sitter_bash", "yaml"},
    ),
    # Companions, which may use the inside of the trainer:
    "megatron_dppo_agents": (
        {
            *("config", "data", "engines", "errors", "files", "functions", "report", "rewards", "rollout", "types"),
            *(CONVERSATIONS, ENGINES),
        },
        {"aiohttp", "numpy", "orjson", "renderers", "torch", "transformers"},
    ),
    "megatron_dppo_report": (BASE | CORE | WINGS | {"setup", ENGINES}, {"numpy", "torch"}),
    "megatron_dppo_convert": (ALL, {"safetensors", "torch", "transformers"}),
    "megatron_dppo_doctor": (ALL, {"numpy", "pyarrow", "torch", "transformers"}),
    "megatron_dppo_lab": (
        ALL | {ANSWERS, "megatron_dppo_convert", "megatron_dppo_report"},
        {"matplotlib", "numpy", "pydantic", "reasoning_gym", "tokenizers", "tomli_w", "torch", "transformers"},
    ),
    "megatron_dppo_plan": (ALL, {"megatron", "numpy", "tomli_w", "torch", "transformers"}),
    "megatron_dppo_tinker": (ALL | {"megatron_dppo_agents", "megatron_dppo_doctor"}, {"aiohttp", "pydantic", "torch"}),
}

TRITON = ("row_kernels_triton", "triton_kernels")
"""the modules of ``head`` that need Triton"""


def package_of(file: Path) -> str:
    beside = [name for name, folder in BESIDE.items() if file.is_relative_to(folder)]
    return beside[0] if beside else file.relative_to(TRAINER).parts[0].removesuffix(".py")


@cache
def parse(source: str) -> ast.Module:
    return ast.parse(source)


@cache
def imports(source: str) -> list[str]:
    """Every imported name at any nesting level: ``a.b`` for ``import a.b``, ``a.b.c`` for ``from a.b import c``."""
    return list(_imports(source))


def _imports(source: str) -> Iterator[str]:
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative imports hide the package"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called.endswith(("import_module", "__import__")) and isinstance(node.args[0], ast.Constant):
                yield str(node.args[0].value)


def forbidden(package: str, source: str) -> list[str]:
    """Return the imports of a file that the table of its package does not allow."""
    ours, theirs = PACKAGES[package]
    wrong = []
    for name in imports(source):
        top, _, rest = name.partition(".")
        if top == "megatron_dppo":
            allowed = rest.split(".")[0] in {*ours, package}
        elif top.startswith("megatron_dppo_"):
            allowed = top in {*ours, package}
        else:
            allowed = top in theirs or top in sys.stdlib_module_names
        if name.startswith("torch.distributed") and package not in _TORCH_DISTRIBUTED:
            allowed = False
        if not allowed:
            wrong.append(name)
    if package not in _TORCH_DISTRIBUTED:
        nodes = (node for node in ast.walk(parse(source)) if isinstance(node, ast.Attribute))
        attributes = {ast.unparse(node) for node in nodes if node.attr == "distributed"}
        wrong += sorted(attributes & {"torch.distributed"})
    return wrong


def test_the_reader_of_imports_finds_each_form_of_a_forbidden_import() -> None:
    for package, source in (
        ("losses", "def f():\n    if True:\n        from torch import distributed"),
        ("losses", "import torch\ntorch.distributed.get_rank()"),
        ("losses", "import torch.distributed as dist"),
        ("losses", "from megatron_dppo.parallel.platform import Platform"),
        ("losses", "from megatron_dppo import parallel"),
        ("policy", "class A:\n    def f(self):\n        import megatron.core"),
        ("rollout", "from megatron_dppo.mcore.bridge import Bridge"),
        ("rollout", "import importlib\nimportlib.import_module('sglang.srt')"),
        ("rollout", "try:\n    import vllm\nexcept ImportError:\n    pass"),
        ("mcore", "from megatron_dppo.rollout import engine"),
        ("types", "from megatron_dppo.config.schema import Config"),
    ):
        assert forbidden(package, source), source
    assert not forbidden("mcore", "from megatron.core import parallel_state\nimport torch.distributed as dist")


def test_every_package_is_in_the_table_and_the_table_has_no_others() -> None:
    assert {package_of(file) for file in FILES} - {"__init__"} == set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_what_the_table_allows(package: str) -> None:
    wrong = {str(f): forbidden(package, f.read_text()) for f in FILES if package_of(f) == package}
    assert not {name: result for name, result in wrong.items() if result}


def test_only_mcore_its_library_and_its_rehearsal_import_megatron_and_nobody_imports_an_engine() -> None:
    tops = {file: {name.split(".")[0] for name in imports(file.read_text())} for file in FILES}
    assert {package_of(file) for file, names in tops.items() if "megatron" in names} == {
        *("mcore", MEGATRON_CPU, "megatron_dppo_plan")
    }
    assert not [str(file) for file, names in tops.items() if names & {"sglang", "vllm"}]


def test_triton_is_imported_by_its_kernels_alone_and_those_only_when_they_are_called() -> None:
    """Triton is there where torch has CUDA, or for tests; everything else works without it."""
    tops = {file.stem: {name.split(".")[0] for name in imports(file.read_text())} for file in FILES}
    assert {name for name, names in tops.items() if "triton" in names} == {"triton_kernels"}
    for file in FILES:
        at_import = {
            module
            for node in parse(file.read_text()).body
            if isinstance(node, ast.ImportFrom)
            for module in (node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names))
        }
        if file.stem != "row_kernels_triton":
            assert not {f"megatron_dppo.head.{name}" for name in TRITON} & at_import, file


def test_no_packages_import_each_other_in_a_circle() -> None:
    left = {package: ours & PACKAGES.keys() for package, (ours, _) in PACKAGES.items()}
    while left:
        free = [package for package, ours in left.items() if not ours & left.keys()]
        assert free, f"a circle among {sorted(left)}"
        for package in free:
            del left[package]


def test_no_modules_and_no_folders_import_each_other_in_a_circle() -> None:
    """Also inside of a package, which the table does not show, inside of functions, and for type checkers."""
    files = dict(measure_structure.sources(None))
    for with_types in (False, True):
        modules, folders = measure_structure.graphs(files, with_types=with_types)
        assert len(modules) > 300 and "mcore.checkpoint" in folders
        assert not measure_structure.circles(modules) and not measure_structure.circles(folders)


def name_of(file: Path) -> str:
    package = BESIDE.get(package_of(file), TRAINER)
    return ".".join(file.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")


@cache
def modules_without_megatron() -> list[str]:
    """Modules from which no chain of top-level imports leads to mcore, by the files as they are."""
    known = {name_of(file) for file in FILES}
    reach = {name: set[str]() for name in known}
    for file in FILES:
        for node in parse(file.read_text()).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron_dppo"):
                result = {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
                reach[name_of(file)] |= result & known
    heavy = {name for name in known if name.startswith(("megatron_dppo.mcore", f"{MEGATRON_CPU}."))}
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
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=TRAINER.parent)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[]", "False"]


def test_the_packages_that_load_without_megatron_are_those_that_the_table_promises() -> None:
    light = set(modules_without_megatron())
    heavy = {package_of(file) for file in FILES if name_of(file) not in light and file.stem not in (*TRITON, "train")}
    assert heavy == {"commands", "mcore", "policy", "process", "run", "setup"} | {
        f"megatron_dppo_{name}" for name in ("doctor", "lab", "megatron_cpu", "plan", "tinker")
    }
    assert {"megatron_dppo.weights.publish", "megatron_dppo.weights.sync", "megatron_dppo.setup.engines"} <= light

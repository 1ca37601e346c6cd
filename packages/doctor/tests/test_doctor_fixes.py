"""The commands of doctor's table, run by pip in the state in which they are printed. Packages are metadata alone."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from megatron_dppo.mcore import transformer_engine
from megatron_dppo_doctor.doctor.combinations import find_bad_combinations
from megatron_dppo_doctor.doctor.machine import MachineFacts
from test_doctor import BAD, GOOD

pytestmark = pytest.mark.slow
_TE = "transformer_engine"
INDEX: list[tuple[str, str, list[str]]] = [
    # name, version, requirements: as PyPI has them on 29 November 2026
    ("torch", "2.15.0", ["triton~=3.9.0"]),
    ("torch", "2.13.0", ["triton==3.7.1"]),
    ("torch", "2.11.0", ["triton==3.6.0"]),
    ("triton", "3.9.0", []),
    ("triton", "3.7.1", []),
    ("triton", "3.6.0", []),
    ("tilelang", "0.1.15", ["torch"]),
    ("transformers", "5.24.0", []),
    ("psutil", "7.2.2", []),
    ("megatron-core", "0.20.0", ["torch>=2.6.0"]),
    ("megatron-core", "0.19.2", ["torch>=2.6.0"]),
    ("megatron-core", "0.16.1", ["torch>=2.6.0"]),
    (
        _TE,
        "2.20.2",
        [
            *(f"{_TE}_cu{each}==2.20.2; extra == 'core-cu{each}'" for each in ("12", "13")),
            f"{_TE}_cu12==2.20.2; extra == 'core'",
            f"{_TE}_torch==2.20.2; extra == 'pytorch'",
        ],
    ),
    (f"{_TE}_cu12", "2.20.2", []),
    (f"{_TE}_cu13", "2.20.2", []),
    (f"{_TE}_torch", "2.20.2", ["torch"]),
]
BUILT_FOR = "built_for.txt"
"""File of the part of Transformer Engine that pip builds for the installed torch."""


def write_wheel(folder: Path, name: str, version: str, requires: list[str], built_for: str = "this torch") -> Path:
    name = name.replace("-", "_")
    record, info = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    extras = sorted({match for each in requires for match in re.findall(r"extra == '([^']+)'", each)})
    metadata = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    metadata += [f"Requires-Dist: {each}" for each in requires] + [f"Provides-Extra: {each}" for each in extras]
    with zipfile.ZipFile(record, "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "\n".join(metadata) + "\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
        if name == f"{_TE}_torch":
            wheel.writestr(BUILT_FOR, built_for)
    return record


class Environment:
    """A virtual environment, and an index without a network."""

    def __init__(self, folder: Path, index: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        self._python, self._index = folder / "bin/python", index
        (self.site,) = folder.glob("lib/python*/site-packages")

    def add(self, wheel: Path) -> None:
        """Install a wheel whatever it requires."""
        with zipfile.ZipFile(wheel) as opened:
            opened.extractall(self.site)
            names = [name for name in opened.namelist() if not name.endswith("/RECORD")]
            (record,) = {*opened.namelist()} - {*names}
        (self.site / record).write_text("".join(f"{name},,\n" for name in (*names, record)))

    def run(self, command: str) -> None:
        """Run shell commands, in which ``pip`` is that of this environment."""
        pip = f"pip() {{ '{sys.executable}' -m pip --python '{self._python}' \"$@\"; }}\n"
        variables = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self._index), "PIP_CONFIG_FILE": "/dev/null"}
        done = subprocess.run(["bash", "-ec", pip + command], env=variables, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"

    def packages(self) -> dict[str, str]:
        return {_dashed(each.name): each.version for each in distributions(path=[str(self.site)])}

    def unmet(self) -> set[str]:
        """Requirements of the packages that no package meets."""
        present, result = self.packages(), set()
        for each in distributions(path=[str(self.site)]):
            for requirement in map(Requirement, each.requires or []):
                version = present.get(_dashed(requirement.name), "0")
                is_asked = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
                if is_asked and not requirement.specifier.contains(version, prereleases=True):
                    result.add(f"{each.name} {each.version} requires {requirement}")
        return result

    def built_for(self) -> str | None:
        file = self.site / BUILT_FOR
        return file.read_text() if file.exists() else None


def _dashed(name: str) -> str:
    return name.replace("_", "-")


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("index")
    for row in INDEX:
        write_wheel(folder, *row)
    return folder


def install(path: Path, index: Path, packages: Mapping[str, str]) -> Environment:
    """Return an environment with these versions, whatever they require, and an engine built for another torch."""
    requirements = {(_dashed(name), version): requires for name, version, requires in INDEX}
    (path / "old").mkdir()
    made = Environment(path / "venv", index)
    for name, version in packages.items():
        requires = requirements.get((name, version.partition("+")[0]), [])
        made.add(write_wheel(path / "old", name, version, requires, "another torch"))
    return made


def commands(fix: str) -> list[str]:
    """Return the alternatives of a fix that are commands of pip."""
    return [command.rstrip() for command in re.findall(r"(pip (?:un)?install (?:[^,.;:(]|[.,](?=\S))*)", fix)]


FIXED = ("old megatron", "new megatron", "no megatron", "psutil", "transformers", "torch", "cpu build")
FIXED += ("engine of another CUDA", "old engine", "no engine", "no triton", "delta kernels")
"""Cases whose fix is a command of pip. Those of the other cases change variables, compilers or machines."""
WITHOUT = {"no engine": {"transformer-engine", "transformer-engine-cu13"}, "cpu build": {"triton"}}
"""Packages that the machine of a case lacks, and that do not decide the case in the table."""


@pytest.mark.parametrize("case", FIXED)
def test_each_command_of_a_fix_ends_its_state_and_breaks_no_requirement(case: str, tmp_path: Path, index: Path) -> None:
    machine, observed, _ = BAD[case]
    packages = {name: version for name, version in machine.packages.items() if name not in WITHOUT.get(case, ())}
    if any(name.startswith("transformer-engine") for name in packages):
        packages["transformer-engine-torch"] = packages["transformer-engine"]
    (match,) = find_bad_combinations(replace(machine, packages=packages))
    for number, command in enumerate(commands(match.fix)):
        folder = tmp_path / str(number)
        folder.mkdir()
        made = install(folder, index, packages)
        before = made.unmet()
        made.run(command)
        after = facts(machine, made)
        assert observed not in [other.observed for other in find_bad_combinations(after)], command
        assert not made.unmet() - before, command
        if "engine" in case:
            assert made.built_for() == "this torch" and "transformer-engine-cu13" in after.packages
            assert not [*find_bad_combinations(after)]
    assert commands(match.fix), match.fix


def facts(machine: MachineFacts, made: Environment) -> MachineFacts:
    """Return what doctor reads after a fix: packages, and what follows from them on a machine with GPUs."""
    packages = made.packages()
    cuda = None if "+cpu" in packages["torch"] else "13.0"
    engine = "works" if "transformer-engine-torch" in packages else "not installed"
    return replace(machine, packages=packages, torch_cuda=cuda, gpus=GOOD.gpus, transformer_engine=engine)


def test_the_command_of_an_engine_that_cannot_be_imported_builds_it_again(
    tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version and CUDA are right, and only the torch has changed: pip finds all requirements satisfied."""
    monkeypatch.setattr("torch.version.cuda", "13.0")

    def fail(name: str) -> None:
        raise OSError("undefined symbol")

    monkeypatch.setattr(transformer_engine.importlib, "import_module", fail)
    with pytest.raises(Exception, match="undefined symbol") as error:
        transformer_engine.has_transformer_engine()
    rebuild, remove = str(error.value).partition(" Fix: ")[2].split(". Or train on plain torch layers: ")
    packages = {**GOOD.packages, "transformer-engine-torch": "2.20.2"}
    made = install(tmp_path, index, packages)
    assert made.built_for() == "another torch"
    made.run(rebuild)
    assert made.built_for() == "this torch" and made.packages() == packages
    made.run(remove)
    assert not [name for name in made.packages() if name.startswith("transformer-engine")]

"""Generated pages are up to date, links and names on the pages exist, and sentences are short."""

from __future__ import annotations

import dataclasses
import re
import runpy
import statistics
import sys
from pathlib import Path

from megatron_dppo.commands.registry import installed_commands
from megatron_dppo.config.loss import LossConfig
from megatron_dppo.types import LossInputs, LossOutput
from tests.unit.test_doc_blocks import make_targets

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from measure_language import sentences  # noqa: E402
from source_folders import PAGES, PYTHON_FILES, SOURCES  # noqa: E402


def test_configuration_page_is_what_the_tool_writes() -> None:
    tool = runpy.run_path(str(ROOT / "tools/write_configuration_doc.py"))
    assert (ROOT / "docs/configuration.md").read_text(encoding="utf-8") == tool["document"]()


def test_page_of_models_is_what_the_tool_writes() -> None:
    tool = runpy.run_path(str(ROOT / "tools/write_models_doc.py"))
    page = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    assert page == tool["document"](page)
    assert page.count(tool["BEGIN"]) == 2


def test_the_worked_example_of_a_family_is_in_its_file() -> None:
    page = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(def _shape.*?)```", page, re.DOTALL)
    family = ROOT / "megatron_dppo/hf/families/olmoe.py"
    assert code in family.read_text(encoding="utf-8")
    for path, lines in (("hf/families/olmoe.py", 47), ("mcore/head_norm.py", 50)):
        assert f"| `{path}` | {lines} |" in page
        assert len((ROOT / "megatron_dppo" / path).read_text(encoding="utf-8").splitlines()) == lines


def test_every_test_that_the_page_of_faults_names_is_there() -> None:
    last, missing = "", []
    named = re.findall(
        r"`((?:tests|packages)/[\w/]+\.py)?(?:::(\w+))?`", (ROOT / "docs/faults.md").read_text(encoding="utf-8")
    )
    for path, name in named:
        last = path or last
        if last and not (ROOT / last).is_file():
            missing.append(last)
        elif name and f"def {name}(" not in (ROOT / last).read_text(encoding="utf-8"):
            missing.append(f"{last}::{name}")
    assert len(named) > 80 and not missing


def test_every_command_and_target_that_the_pages_name_is_there() -> None:
    targets = make_targets()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        code = "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S) + re.findall(r"`([^`\n]+)`", text))
        commands = set(re.findall(r"(?<![\w/-])megatron-dppo ([a-z][a-z-]*)", code))
        assert commands <= installed_commands().keys(), (page.name, commands - installed_commands().keys())
        made = set(re.findall(r"(?:^|&& |`)make ([a-z][a-z0-9-]*)", code, re.M))
        assert made <= targets, (page.name, made - targets)


def test_readme_names_the_lines_that_mask_a_token() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    named = re.search(r"\[`losses/dppo\.py:(\d+)-(\d+)`\]\(megatron_dppo/losses/dppo\.py#L(\d+)-L(\d+)\)", readme)
    assert named
    first, last = int(named[1]), int(named[2])
    assert (int(named[3]), int(named[4])) == (first, last)
    lines = (ROOT / "megatron_dppo/losses/dppo.py").read_text(encoding="utf-8").splitlines()[first - 1 : last]
    assert [line.split(" = ")[0].strip() for line in lines] == ["masked_going_up", "masked_going_down"]
    for page in ("docs/loss.md", "docs/faq.md"):
        quoted = (ROOT / page).read_text(encoding="utf-8")
        assert "\n".join(line.strip() for line in lines) in quoted, page


def test_page_of_the_api_lists_every_field_of_the_loss() -> None:
    page = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    for kind in (LossInputs, LossOutput):
        table = page.split(f"| `{kind.__name__}` |")[1].split("\n\n")[0]
        listed = [name for line in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", line.split(" | ")[0])]
        assert sorted(listed) == sorted(field.name for field in dataclasses.fields(kind))


def test_home_page_and_citation_name_the_version() -> None:
    package = (ROOT / "megatron_dppo/__init__.py").read_text(encoding="utf-8")
    version = re.search(r'^__version__ = "(.+)"$', package, re.M)
    assert version
    assert f"Version {version[1]}." in (ROOT / "docs/index.md").read_text(encoding="utf-8")
    assert f"\nversion: {version[1]}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    notes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\n## {version[1]}\n" in notes, "the newest version has notes"


def test_make_docs_counts_broken_links() -> None:
    """Quiet, mkdocs neither prints warnings nor counts them as errors of the strict mode."""
    (options,) = re.findall(r"-m mkdocs build([^#\n]*)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert "-q" not in options and "strict: true" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_pages_for_users_stay_few() -> None:
    """Figures have a folder of their own, and a page of a package is its README."""
    pages = [page for page in PAGES if page.is_relative_to(ROOT / "docs") and "results" not in page.parts]
    assert len(pages) <= 46


def test_pages_that_code_names_are_there() -> None:
    """Errors, comments and scripts name pages by their path."""
    folders = ("megatron_dppo", "packages", "launch", "examples", "tools", "benchmarks", "tests")
    kinds = {".py", ".sh", ".toml", ".yaml", ".def", ""}
    files = [file for folder in folders for file in (ROOT / folder).rglob("*") if file.suffix in kinds]
    pattern = re.compile(r"(?<![\w/])(?:docs|packages|benchmarks)/[\w/]+\.md\b")
    named = {
        (page, file.relative_to(ROOT).as_posix())
        for file in (*files, ROOT / "Makefile")
        if file.is_file()
        for page in pattern.findall(file.read_text("utf-8", "ignore"))
    }
    assert len(named) > 80 and not [each for each in sorted(named) if not (ROOT / each[0]).is_file()]


def test_links_between_pages_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
            file, _, anchor = target.partition("#")
            there = (page.parent / file).resolve() if file else page
            if not there.exists():
                broken.append(f"{page.name}: {target}")
            elif anchor and there.suffix == ".md":
                heads = re.findall(r"^#+ (.+)$", there.read_text(encoding="utf-8"), re.M)
                if anchor not in {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}:
                    broken.append(f"{page.name}: {target}")
    assert not broken


def test_readme_is_short_and_so_are_its_sentences() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lengths = [len(sentence.split()) for sentence in sentences(text)]
    assert len(text.split()) <= 1100, "five minutes at 220 words a minute"
    assert statistics.fmean(lengths) <= 15 and max(lengths) <= 25


def test_sentences_of_pages_are_short() -> None:
    """A page may be above a limit where it is generated or quotes output."""
    generated = {"configuration.md"}
    pages = [page for page in PAGES if page.name not in generated]
    long = {}
    for page in pages:
        lengths = [len(sentence.split()) for sentence in sentences(page.read_text(encoding="utf-8"))]
        if lengths and (statistics.fmean(lengths) > 18 or max(lengths) > 50):
            long[page.name] = (statistics.fmean(lengths), max(lengths))
    assert not long


def test_modules_that_pages_name_are_there() -> None:
    package = ROOT / "megatron_dppo"
    folders = "|".join(
        sorted(path.name for path in package.iterdir() if path.is_dir() and not path.name.startswith("_"))
    )
    missing = []
    for page in (ROOT / "CONTRIBUTING.md", *PAGES):
        text = page.read_text(encoding="utf-8")
        for name in re.findall(rf"`((?:{folders})/[a-z0-9_/]+\.py)`", text):
            if not (package / name).exists():
                missing.append(f"{page.name}: {name}")
        for name, path in re.findall(r"`(megatron_dppo_[a-z]+)/([a-z0-9_/]+\.py)`", text):
            if not (SOURCES[name] / path).exists():
                missing.append(f"{page.name}: {name}/{path}")
    assert not missing


def test_pages_have_one_answer_on_the_default_threshold() -> None:
    """Pages and docstrings state the default of the code; its source is the table of ``which_loss.md``."""
    tv, kl = (LossConfig(name=name).thresholds for name in ("dppo_binary_tv", "dppo_binary_kl"))  # type: ignore[attr-defined]
    assert (tv, kl) == ((0.15, 0.15), (0.05, 0.05))
    page = (ROOT / "docs/which_loss.md").read_text(encoding="utf-8")
    rows = {name: values for name, *values in re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", page, re.M)}
    assert rows["this package's default"] == ["0.15", "0.05"]
    assert rows["this package's [recipes](recipes.md) of the large runs"] == ["0.2 (LoRA 0.15)", "0.05"]
    stated = []
    for file in (*PAGES, *PYTHON_FILES):
        text = " ".join(file.read_text(encoding="utf-8").split())
        stated += re.findall(r"(0\.\d+)(?: for)? \(?TV\)?,? (?:and|or) (0\.\d+)", text)
    assert len(stated) >= 4 and set(stated) == {("0.15", "0.05")}

"""Folders of the code of this repository: the trainer, and the packages beside it. Their pages."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
TRAINER = ROOT / "megatron_dppo"
PACKAGES = {
    folder.name: folder
    for folder in sorted(ROOT.glob("packages/*/src/megatron_dppo_*"))
    if folder.suffix != ".egg-info"
}
"""Folders of the packages beside the trainer by the name of the import."""
LIBRARIES = ("answers", "conversations", "engines", "megatron_cpu", "port")
"""Folders of ``packages/`` that can be used without the trainer."""
COMPANIONS = tuple(sorted({name.removeprefix("megatron_dppo_") for name in PACKAGES} - {*LIBRARIES}))
"""Folders of ``packages/`` that need the trainer."""
SOURCES = {TRAINER.name: TRAINER, **PACKAGES}
PYTHON_FILES = tuple(file for folder in SOURCES.values() for file in sorted(folder.rglob("*.py")))
"""All modules of trainer and packages."""
DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", *sorted(DOCS.rglob("*.md")), *sorted(ROOT.glob("packages/*/README.md")))
"""All pages for users: the README, those of the site, and one of each package."""
TESTS = (ROOT / "tests", *sorted(ROOT.glob("packages/*/tests")))
"""Folders of tests."""

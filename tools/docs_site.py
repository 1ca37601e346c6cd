"""Hooks of mkdocs: READMEs of packages are pages, and links to other files outside ``docs/`` lead to copies of them.

The pages are also read in the repository, so they link to code, tests and examples by relative paths.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
READMES = tuple(sorted(ROOT.glob("packages/*/README.md")))
_LINK = re.compile(r"(\]\()(?!https?:|#|mailto:)([^)\s#]+)((?:#[^)\s]*)?\))")


def outside(page: Path, target: str) -> Path | None:
    """Return the file of the repository that a link leads to, or None if it is a page or a file of ``docs/``.

    Args:
        page: The file of the page.
        target: The target of the link, relative to the page.
    """
    there = Path(os.path.normpath(page.parent / target))
    if _site_path(there) is not None or not there.is_relative_to(ROOT):
        return None
    return there


def _site_path(file: Path) -> str | None:
    """Return the path of a page or a file on the site, or None if it is not there.

    The page of a package is its README.
    """
    if file.is_relative_to(DOCS):
        return file.relative_to(DOCS).as_posix()
    if file in READMES:
        return f"packages/{file.parent.name}.md"
    return None


def on_config(config: Any) -> Any:
    """Put the version of the package into the footer."""
    package = (ROOT / "megatron_dppo/__init__.py").read_text(encoding="utf-8")
    version = re.search(r'^__version__ = "(.+)"$', package, re.M)
    config.copyright = f"megatron_dppo {version[1] if version else ''}, Apache-2.0"
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the READMEs of the packages, and a copy of each file that a page links to. A folder stands for its README."""
    wanted = set()
    for page in (*DOCS.rglob("*.md"), *READMES):
        for _, target, _ in _LINK.findall(page.read_text(encoding="utf-8")):
            there = outside(page, target)
            if there is not None:
                wanted.add(_readable(there))
    for readme in READMES:
        files.append(File.generated(config, str(_site_path(readme)), content=readme.read_text(encoding="utf-8")))
    for there in sorted(wanted):
        text = there.read_text(encoding="utf-8")
        files.append(File.generated(config, _copy_path(there), content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point the links of a page to those copies, and those from and to the READMEs of packages to their pages."""
    sources = {_site_path(readme): readme for readme in READMES}
    file = sources.get(page.file.src_uri, DOCS / page.file.src_uri)

    def moved(match: re.Match[str]) -> str:
        there = outside(file, match[2])
        anchor = match[3][:-1]
        if there is None:
            path = _site_path(Path(os.path.normpath(file.parent / match[2])))
        else:
            # A copy is plain text, which has no anchors.
            path, anchor = _copy_path(_readable(there)), ""
        if path is None:
            return match[0]
        return f"{match[1]}{os.path.relpath(path, Path(page.file.src_uri).parent)}{anchor})"

    return _LINK.sub(moved, markdown)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Serve the theme's script for searching on the disk from the site itself, not from another host."""
    return output.replace(_REMOTE_SHIM, os.path.relpath(_SHIM, Path(page.file.dest_uri).parent))


def on_post_template(output: str, template_name: str, config: Any) -> str:
    """Do the same for the page of missing pages, which is at the top."""
    return output.replace(_REMOTE_SHIM, _SHIM)


_REMOTE_SHIM = "https://unpkg.com/iframe-worker/shim"
_SHIM = "assets/iframe-worker/shim.js"


def _readable(there: Path) -> Path:
    return there / "README.md" if there.is_dir() else there


def _copy_path(there: Path) -> str:
    """Return the path of the copy, which is a text file so that a browser shows it."""
    return f"source/{there.relative_to(ROOT).as_posix()}.txt"


def github_slugs() -> Any:
    """Return the function that makes anchors as the repository's own view does."""

    def slug(heading: str, separator: str) -> str:
        return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)

    return slug

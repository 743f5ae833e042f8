"""Hooks of the documentation site (mkdocs.yml): what pages need from outside of docs/.

Texts at the top of the repository become pages, and every other file that a page links to becomes a file of
the site, under ``source/``. Links are rewritten, so that they work in the repository and in the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
#: Texts outside of docs/, by the path of their page.
PAGES = {
    "index.md": "README.md",
    "architecture.md": "ARCHITECTURE.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "deploy.md": "deploy/README.md",
    "reporting.md": "SECURITY.md",
}
LINK = re.compile(r"(?<=\]\()([^)#\s]*)(#[^)\s]*)?(?=\))")


def source_of(uri: str) -> Path:
    """The file that a page is made of."""
    return ROOT / PAGES[uri] if uri in PAGES else DOCS / uri


def uri_of(path: Path) -> str:
    """Where a file of the repository is in the site."""
    if path.is_dir():
        path = path / "README.md" if (path / "README.md").exists() else path
    name = path.relative_to(ROOT).as_posix()
    for uri, source in PAGES.items():
        if source == name:
            return uri
    return path.relative_to(DOCS).as_posix() if path.is_relative_to(DOCS) else f"source/{name}"


def targets(uri: str) -> set[Path]:
    """The files that a page links to."""
    source = source_of(uri)
    links = {match[1] for match in LINK.finditer(source.read_text()) if match[1] and "://" not in match[1]}
    return {(source.parent / link).resolve() for link in links}


def rewritten(markdown: str, uri: str) -> str:
    """The text of a page with links between files of the site."""

    def replace(match: re.Match[str]) -> str:
        path = (source_of(uri).parent / match[1]).resolve()
        if not match[1] or "://" in match[1] or not path.exists():
            return match[0]
        return posixpath.relpath(uri_of(path), posixpath.dirname(uri)) + (match[2] or "")

    return LINK.sub(replace, markdown)


def on_files(files: Files, config: Any, **_: object) -> Files:
    for uri, name in PAGES.items():
        files.append(File.generated(config, uri, content=(ROOT / name).read_text()))
    for page in files.documentation_pages():
        for path in targets(page.src_uri):
            uri = uri_of(path)
            if path.is_file() and files.get_file_from_path(uri) is None:
                files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    return rewritten(markdown, page.file.src_uri)

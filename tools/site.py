"""Hooks of the documentation site (mkdocs.yml): what pages need from outside of docs/.

Texts at the top of the repository become pages, and every other file that a page links to becomes a file of
the site, under ``source/``. Links are rewritten, so that they work in the repository and in the site.

What is made from the code or from stored results is not stored in docs/: the generated pages are added here,
and a line that consists of a link to results, such as ``[Results](../benchmarks/results/bus.json)``, becomes
their table. ``python -m tools.site PAGE`` prints a page, for example ``reference/settings.md``.
"""

from __future__ import annotations

import functools
import json
import posixpath
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import markers
from muster.cli import main
from tests.faults import table as faults
from tests.fuzz import result as fuzz
from tests.soak import result as soak
from tests.storm import __main__ as storm
from tools.reference import cli, file_formats, rest, settings, wire

if TYPE_CHECKING:
    from mkdocs.structure.files import Files
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
#: Pages made from the code, by their path.
GENERATED: dict[str, Callable[[], str]] = {
    "reference/cli.md": cli.render_overview,
    **{cli.page_of(name): functools.partial(cli.render_command, name) for name in main.COMMANDS},
    "reference/manifest.md": file_formats.render_page,
    "reference/rest.md": rest.render_page,
    "reference/settings.md": settings.render_page,
    "reference/wire.md": wire.render_page,
}
#: Tables made from results, by the folder of their file.
TABLES: dict[str, Callable[[Any], str]] = {
    "benchmarks/results": markers.markdown,
    "tests/faults": faults.markdown,
    "tests/fuzz": fuzz.markdown,
    "tests/soak": soak.markdown,
    "tests/storm": storm.markdown,
}
RESULTS = re.compile(r"^\[Results[^\]]*\]\(([^)#\s]+\.json)\)$", re.MULTILINE)
LINK = re.compile(r"(?<=\]\()([^)#\s]*)(#[^)\s]*)?(?=\))")


def source_of(uri: str) -> Path:
    """The file that a page is made of; it need not exist if the page is generated."""
    return ROOT / PAGES[uri] if uri in PAGES else DOCS / uri


@functools.cache
def text_of(uri: str) -> str:
    """The Markdown of a page, with the tables of results."""
    source = source_of(uri)

    def table(match: re.Match[str]) -> str:
        file = (source.parent / match[1]).resolve()
        make = TABLES[file.parent.relative_to(ROOT).as_posix()]
        return f"{make(json.loads(file.read_text()))}\n{match[0]}"

    text = GENERATED[uri]() if uri in GENERATED else source.read_text()
    return RESULTS.sub(table, text)


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
    links = {match[1] for match in LINK.finditer(text_of(uri)) if match[1] and "://" not in match[1]}
    return {(source_of(uri).parent / link).resolve() for link in links}


def rewritten(markdown: str, uri: str) -> str:
    """The text of a page with links between files of the site."""

    def replace(match: re.Match[str]) -> str:
        path = (source_of(uri).parent / match[1]).resolve()
        if not match[1] or "://" in match[1] or not path.exists():
            return match[0]
        return posixpath.relpath(uri_of(path), posixpath.dirname(uri)) + (match[2] or "")

    return LINK.sub(replace, markdown)


def on_config(config: Any) -> Any:
    """List the pages of the commands in the navigation."""
    config["nav"] = navigation(config["nav"])
    return config


def navigation(nav: list[Any]) -> list[Any]:
    """As it is stored, with the pages of the commands below their overview."""
    made: list[Any] = []
    for entry in nav:
        ((title, value),) = entry.items() if isinstance(entry, dict) else [("", entry)]
        if value == "reference/cli.md":
            sections = [{section: list(pages)} for section, pages in cli.pages().items()]
            value = [value, *sections]
        elif isinstance(value, list):
            value = navigation(value)
        made.append({title: value} if title else value)
    return made


def on_files(files: Files, config: Any, **_: object) -> Files:
    from mkdocs.structure.files import File

    text_of.cache_clear()  # `mkdocs serve` builds the site again after a change
    for uri in (*PAGES, *GENERATED):
        files.append(File.generated(config, uri, content=text_of(uri)))
    for page in files.documentation_pages():
        for path in targets(page.src_uri):
            uri = uri_of(path)
            if path.is_file() and files.get_file_from_path(uri) is None:
                files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(_markdown: str, page: Page, **_: object) -> str:
    return rewritten(text_of(page.file.src_uri), page.file.src_uri)


if __name__ == "__main__":
    sys.stdout.write(text_of(sys.argv[1]))

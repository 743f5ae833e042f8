"""The documentation site: navigation, links, the reference, and what a search finds."""

from __future__ import annotations

import functools
import importlib
import json
import os
import posixpath
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import muster
from tools import docstrings, site

CONFIG = yaml.safe_load((site.ROOT / "mkdocs.yml").read_text())
STORED = [path.relative_to(site.DOCS).as_posix() for path in site.DOCS.rglob("*.md")]
URIS = sorted([*site.PAGES, *site.GENERATED, *STORED])
#: What people look for, and the page that they have to find.
SEARCHES = {
    "unit test": "guides/testing.html",
    "redelivery": "guides/retry.html",
    "rolling update": "guides/updates.html",
    "muster apply": "reference/cli/apply.html",
}
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def entries(nav: Any) -> Iterator[str]:
    """The pages of the navigation, in order."""
    for entry in nav:
        value = next(iter(entry.values())) if isinstance(entry, dict) else entry
        if isinstance(value, str):
            yield value
        else:
            yield from entries(value)


@functools.cache
def anchors(path: Path) -> set[str]:
    """The anchors of the headings of a page, as Python-Markdown makes them."""
    titles = HEADING.findall(FENCE.sub("", site.text_of(site.uri_of(path))))
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in titles]
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in plain}


def test_every_page_is_in_the_navigation_once():
    assert sorted(entries(site.navigation(CONFIG["nav"]))) == URIS


@pytest.mark.parametrize("uri", URIS)
def test_links_lead_to_files_and_headings(uri: str):
    source = site.source_of(uri)
    broken = []
    for match in site.LINK.finditer(FENCE.sub("", site.text_of(uri))):
        link, anchor = match[1], (match[2] or "").removeprefix("#")
        if "://" in link:
            continue
        if posixpath.join(posixpath.dirname(uri), link) in site.GENERATED:
            continue
        path = (source.parent / link).resolve() if link else source
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path)):
            broken.append(match[0])
    assert broken == []


@pytest.mark.parametrize(
    ("uri", "link", "expected"),
    [
        ("index.md", "docs/guides/README.md", "guides/README.md"),
        ("guides/python.md", "../../examples/service.py", "../source/examples/service.py"),
        ("tutorial.md", "../README.md", "index.md"),
        ("decisions/README.md", "0001-settings.md", "0001-settings.md"),
        ("index.md", "docs/decisions/", "decisions/README.md"),
        ("security.md", "../SECURITY.md#scope", "reporting.md#scope"),
        ("index.md", "https://example.org/x.md", "https://example.org/x.md"),
    ],
)
def test_links_of_the_repository_become_links_of_the_site(uri: str, link: str, expected: str):
    assert site.rewritten(f"[a]({link})", uri) == f"[a]({expected})"


@pytest.mark.parametrize("uri", site.GENERATED)
def test_a_generated_page_is_stable_and_not_stored(uri: str):
    page = site.GENERATED[uri]()
    assert page.startswith("# ")
    assert page == site.GENERATED[uri]()
    assert not site.source_of(uri).exists()


def test_a_link_to_results_becomes_their_table():
    page = site.text_of("benchmarks.md")
    assert page.count("| metric | ours |") == len(site.RESULTS.findall(page)) > 10


def test_the_api_reference_names_what_is_public():
    page = (site.DOCS / "reference" / "python.md").read_text()
    listed = re.findall(r"^::: (\S+)$", page, re.MULTILINE)
    objects = []
    for name in listed:
        module, _, attribute = name.rpartition(".")
        parent = importlib.import_module(module)
        objects.append(getattr(parent, attribute, None) or importlib.import_module(name))
    public = [getattr(muster, name) for name in muster.__all__ if name not in ("__version__", "blocking")]
    inside_errors = [muster.MusterError]  # in the module `errors`
    assert [item for item in public if item not in objects + inside_errors] == []


def test_examples_in_docstrings_become_code():
    text = "Read it.\n\n>>> m.contexts[\"a\"]\n'b'\n\nMore."
    assert docstrings.fenced(text) == "Read it.\n\n```pycon\n>>> m.contexts[\"a\"]\n'b'\n```\n\nMore."


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_site_is_built_without_a_warning(tmp_path: Path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(
        command, cwd=site.ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    page = (tmp_path / "site" / "reference" / "python.html").read_text()
    assert "publish" in page
    assert "muster up" in (tmp_path / "site" / "reference" / "cli.html").read_text()
    assert "--detach" in (tmp_path / "site" / "reference" / "cli" / "up.html").read_text()
    assert "<th>metric</th>" in (tmp_path / "site" / "benchmarks.html").read_text()
    index = json.loads((tmp_path / "site" / "search" / "search_index.json").read_text())
    for words, where in SEARCHES.items():
        with_words = {
            entry["location"].split("#")[0] for entry in index["docs"] if words in str(entry).lower()
        }
        assert where in with_words, f"a search for {words!r} does not find {where}"
    assert (tmp_path / "site" / "source" / "examples" / "service.py").exists()

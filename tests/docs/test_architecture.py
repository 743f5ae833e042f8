"""The list of folders in ARCHITECTURE.md equals the tree."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def listed() -> list[str]:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    block = re.search(r"```text\nsrc/muster/\n(.*?)```", text, re.DOTALL)
    assert block is not None, "ARCHITECTURE.md has no ```text block that begins with src/muster/"
    return re.findall(r"^  (\w+)/ +\S", block[1], re.MULTILINE)


def folders() -> set[str]:
    return {path.parent.name for path in (ROOT / "src" / "muster").glob("*/__init__.py")}


def test_the_list_of_folders_is_the_tree():
    names = listed()
    assert len(names) == len(set(names))
    assert set(names) == folders()


def test_the_floors_are_listed_from_top_to_bottom():
    """In the order in which import-linter keeps them."""
    contracts = (ROOT / "pyproject.toml").read_text()
    layers = re.search(r"^layers = \[\n(.*?)^\]", contracts, re.MULTILINE | re.DOTALL)
    assert layers is not None
    floor = {
        name: number
        for number, line in enumerate(re.findall(r'"(.*?)"', layers[1]))
        for name in re.findall(r"\w+", line)
    }
    order = [floor[name] for name in listed()]
    assert order == sorted(order)


def test_the_readmes_picture_names_packages():
    picture = re.search(r"sense ──>.*?\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert picture is not None
    loop, *others = picture[1].strip().splitlines()
    named = [*re.split(r"\s{3,}", loop)[:5], *re.findall(r"^ +([a-z]+) ", "\n".join(others), re.MULTILINE)]
    assert {"loop", "core"} <= set(named) <= folders()


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "docs/walkthrough.md"])
def test_each_module_that_is_named_exists(page):
    named = re.findall(r"`([a-z_]+(?:/[a-z_]+)+\.py|[a-z_]+/[a-z_]+/)`", (ROOT / page).read_text())
    assert len(named) > 10
    assert [
        name for name in named if not ((ROOT / "src" / "muster" / name).exists() or (ROOT / name).exists())
    ] == []


def test_each_test_that_the_security_page_names_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / "docs" / "security.md").read_text())
    assert len(named) > 20
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not (ROOT / path).is_file() or (name and f"def {name}(" not in (ROOT / path).read_text())
    ]
    assert missing == []


def test_each_capability_of_the_papers_names_the_tests_that_show_it():
    """A capability that is left out says so."""
    text = (ROOT / "docs" / "papers.md").read_text()
    tables = re.findall(
        r"^\| described in the paper \| here \| test \|\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE
    )
    assert len(tables) == text.count("described in the paper") == 5
    for row in "".join(tables).splitlines():
        _, here, tests = (cell.strip() for cell in row.strip("|").split("|"))
        named = [name for name in re.findall(r"`([^`]+)`", tests) if not name.startswith("make ")]
        assert named or here.startswith("left out"), row
        assert [name for name in named if not (ROOT / "tests" / name).exists()] == [], row


def test_each_promise_of_the_readme_names_the_tests_that_show_it():
    promises = re.search(r"\| Tests \|\n\|[-|]+\|\n(.*?)\n\n", (ROOT / "README.md").read_text(), re.DOTALL)
    assert promises is not None
    for row in promises[1].splitlines():
        named = re.findall(r"`([^`]+)`", row.rstrip("|").rpartition("|")[2])
        assert named, row
        assert [name for name in named if not name.endswith(".py") or not (ROOT / name).is_file()] == []


#: They implement `api.Bus.request`, or send requests to topics of users.
RAW_REQUESTS = {
    "muster/bus": "the mechanism itself, and requests to the brokers",
    "muster/client/messages.py": "`m.request(topic)` and `muster request TOPIC`",
}


def raw_requests(path: Path) -> list[str]:
    """Calls of `api.Bus.request`: the subject and the data are its two positional arguments. A function
    ``request`` of a module is something else.
    """
    nodes = list(ast.walk(ast.parse(path.read_text())))
    modules = {
        alias.asname or alias.name
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    return [
        f"{path.relative_to(ROOT / 'src')}:{node.lineno}"
        for node in nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "request"
        and len(node.args) == 2
        and not (isinstance(node.func.value, ast.Name) and node.func.value.id in modules)
    ]


def test_services_send_requests_through_bus_rpc_only():
    calls = [call for path in sorted((ROOT / "src" / "muster").rglob("*.py")) for call in raw_requests(path)]
    unexpected = [call for call in calls if not call.startswith(tuple(RAW_REQUESTS))]
    assert unexpected == [], "call `exchange`, `call` or `exchange_once` of `bus/rpc/client.py` instead"
    unused = [name for name in RAW_REQUESTS if not any(call.startswith(name) for call in calls)]
    assert unused == [], "these call no raw request any more"

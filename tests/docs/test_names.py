"""Names in docstrings and decision records exist.

A name in single backticks refers to the code, or to a setting. With a dot it is resolved from any module or
class on, as in `errors.NotFound`; a name without one occurs in its package. What is not ours and not
importable, and what is no name, stands in double backticks.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from muster.app import settings as app_settings
from muster.client import synchronous
from muster.core.settings import sections
from tests.docs import blocks

SOURCE = blocks.ROOT / "src"
QUOTED = re.compile(r"(?<!`)`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\(.*?\))?`(?!`)")
SUBJECT = re.compile(r"muster\.\w+\.(?:from|to|all|log)\.")
FILE = re.compile(r"\.(?:toml|json|jsonl|yaml|md|db|service|log|key|py)\Z")
#: Renamed for a reader: `muster.blocking`, and exact columns beside the columns of codes.
RENAMED = {"muster.blocking_connection", "muster.predicates.backends.columns"}
ALIASES = {"m": "AsyncMuster"}  # as in the examples of `muster.open`
OF_PROGRAMS = re.compile(r"(?<![\w.\\])m\.([a-z_]+)\b(?:\.([a-z_]+))?")  # `m.publish`, `m.fleet.apply`
PARTS = {
    "alerts": synchronous.Alerts,
    "contexts": synchronous.Contexts,
    "fleet": synchronous.Fleet,
    "history": synchronous.History,
    "notify": synchronous.Notify,
    "reports": synchronous.Reports,
}


class NamedModule:
    """What a module defines, and what its docstrings name."""

    def __init__(self, path: Path) -> None:
        self.path = path.relative_to(SOURCE)
        parts = self.path.with_suffix("").parts
        self.parts = parts[:-1] if parts[-1] == "__init__" else parts
        self.named: list[tuple[int, str]] = []  # the line of the documented object, and a name
        self.words = {*self.path.parts, self.path.stem}
        self.aliases: dict[str, str] = {}
        self.bound: set[str] = set()  # names that it gives
        self.renamed: dict[str, set[str]] = defaultdict(set)  # modules that it imports under other names
        self.classes: dict[str, tuple[set[str], set[str]]] = {}  # members, bases
        tree = ast.parse(path.read_text())
        self.members = set(defined(tree.body))
        for node in ast.walk(tree):
            self._add(node)

    def _add(self, node: ast.AST) -> None:
        for field in ("id", "attr", "name", "arg", "asname", "module"):
            text = getattr(node, field, None)
            self.words.update(text.split(".") if isinstance(text, str) else ())
        match node:
            case ast.Constant(value=str(text)) if " " not in text:
                self.words.update(re.findall(r"\w+", text))
            case ast.Import() | ast.ImportFrom():
                self.aliases |= {alias.asname: alias.name for alias in node.names if alias.asname}
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("muster"):
                    for alias in node.names:
                        place = f"{node.module}.{alias.name}"
                        if alias.asname and alias.name.islower() and place not in RENAMED:
                            self.renamed[alias.name].add(place)
                self.bound |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
            case ast.Name(id=name) | ast.arg(arg=name) | ast.MatchAs(name=str(name)):
                self.bound.add(name)
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ExceptHandler(name=str(name))
            ):
                self.bound.add(name)
            case ast.ClassDef():
                self.bound.add(node.name)
                stored = (each for each in ast.walk(node) if isinstance(each, ast.Attribute))
                members = {each.attr for each in stored if isinstance(each.ctx, ast.Store)}
                bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
                self.classes[node.name] = members | set(defined(node.body)), bases
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False) or ""
            self.named += [(getattr(node, "lineno", 1), name) for name in QUOTED.findall(text)]


def defined(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Assign():
                yield from (each.id for each in ast.walk(node) if isinstance(each, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Import() | ast.ImportFrom():
                yield from (alias.asname or alias.name for alias in node.names)
            case ast.If() | ast.Try():
                yield from defined(node.body + node.orelse)


@functools.cache
def modules() -> list[NamedModule]:
    return [NamedModule(path) for path in sorted(SOURCE.rglob("*.py"))]


@functools.cache
def members() -> dict[str, set[str]]:
    """What may follow a name: of each ending of a module's path, and of each class with its bases."""
    following: dict[str, set[str]] = defaultdict(set)
    bases: dict[str, set[str]] = defaultdict(set)
    for module in modules():
        for start in range(len(module.parts)):
            following[".".join(module.parts[start:])] |= module.members
            for end in range(start + 1, len(module.parts)):
                following[".".join(module.parts[start:end])].add(module.parts[end])
        for name, (own, its_bases) in module.classes.items():
            following[name] |= own
            bases[name] |= its_bases
    for name in bases:
        waiting, seen = [name], {name}
        while waiting:
            further = bases.get(waiting.pop(), set()) - seen
            following[name].update(*(following.get(base, set()) for base in further))
            seen |= further
            waiting += further
    return following


@functools.cache
def words(package: str) -> set[str]:
    """The names and words in a package of muster, and the names of its modules."""
    inside = (module.words for module in modules() if module.path.parts[1] == package)
    return set(dir(builtins)).union(*inside)


@functools.cache
def settings() -> set[str]:
    keys = {field.key for field in sections.fields(app_settings.Settings)}
    return {".".join(key.split(".")[:count]) for key in keys for count in range(1, 1 + key.count(".") + 1)}


def exists(name: str, aliases: Mapping[str, str] = ALIASES) -> bool:
    """``aliases``: what the module that names it calls others."""
    if SUBJECT.match(name) or FILE.search(name) or name in settings():
        return True
    head, *parts = name.split(".")
    head = {**ALIASES, **aliases}.get(head, head)
    parts = [head, *parts]
    for split in range(1, len(parts)):
        following = [".".join(parts[:split]), *parts[split:]]
        pairs = itertools.pairwise(following)
        if following[0] in members() and all(after in members().get(name, {after}) for name, after in pairs):
            return True
    return is_of_a_library(head, parts[1:])


def is_of_a_library(module: str, names: list[str]) -> bool:
    try:
        functools.reduce(getattr, names, importlib.import_module(module))
    except (ImportError, AttributeError):
        return False
    return True


def test_names_in_docstrings_exist():
    missing = [
        f"{module.path}:{line}: {name}"
        for module in modules()
        for line, name in module.named
        if not (exists(name, module.aliases) if "." in name else name in words(module.path.parts[1]))
    ]
    assert missing == []


def test_modules_keep_their_names_where_nothing_else_has_them():
    renamed = [
        f"{module.path}: {place}"
        for module in modules()
        for name, places in module.renamed.items()
        for place in places
        if name not in module.bound and len(places) == 1 and not hasattr(builtins, name)
    ]
    assert renamed == []


def test_names_in_decision_records_exist():
    """A superseded record names what was."""
    records = {path.name: path.read_text() for path in (blocks.ROOT / "docs" / "decisions").glob("0*.md")}
    valid = {record: text for record, text in records.items() if "superseded by" not in text.lower()}
    names = [(record, name) for record, text in sorted(valid.items()) for name in QUOTED.findall(text)]
    assert len(names) > 100
    assert [f"{record}: {name}" for record, name in names if "." in name and not exists(name)] == []


def test_methods_that_pages_and_examples_call_exist():
    paths = [*blocks.ROOT.glob("*.md"), *blocks.ROOT.glob("docs/**/*.md"), *blocks.ROOT.glob("examples/*.*")]
    called = [(path.name, *names) for path in paths for names in OF_PROGRAMS.findall(path.read_text())]
    assert len(called) > 100
    missing = []
    for page, name, method in called:
        part = PARTS.get(name, synchronous.Muster)
        needed = method if name in PARTS else name
        if needed and needed != "bus" and not hasattr(part, needed):
            missing.append(f"{page}: m.{name}.{method}")
    assert missing == []

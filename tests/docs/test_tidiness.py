"""What must not be anywhere in the repository. Every failure names the file and the line."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Spelt in pieces, so that this file keeps its own rules.
REGISTRIES = [
    "".join(parts)
    for parts in (
        ("pyp", "i.org"),
        ("python", "hosted.org"),
        ("npm", "js.org"),
        ("crates", ".io"),
        ("proxy.go", "lang.org"),
        ("mav", "en.org"),
        ("deb.deb", "ian.org"),
    )
]
FOLDERS = ("root", "work", r"home/\w{2,}", r"Users/\w+")
MACHINE_PATHS = re.compile("|".join(f"/{name}/" for name in FOLDERS))
UNFINISHED = re.compile(
    r"\b(TODO|FIXME|XXX|HACK)\b|\bfor now\b(?!,)|raise NotImplementedError", re.IGNORECASE
)
BYTES_MAX = 300_000
ANIMATION_BYTES_MAX = 600_000


def tracked() -> list[Path]:
    """The files that git knows, or would know; without git, those of a source distribution."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listing.returncode == 0:
        paths = (ROOT / name for name in listing.stdout.splitlines())
    else:
        paths = (path for name in ("src", "tests", "benchmarks", "docs") for path in (ROOT / name).rglob("*"))
    return [path for path in paths if path.is_file() and "__pycache__" not in path.parts]


FILES = tracked()
#: Pictures, and the stored formats in tests/fixtures
BINARY = (".png", ".webp", ".gz", ".msgpack", ".arrow")
TEXTS = {path: path.read_text() for path in FILES if path.suffix not in BINARY}


def lines(pattern: re.Pattern[str], *folders: str) -> Iterator[str]:
    for path, text in TEXTS.items():
        name = path.relative_to(ROOT).as_posix()
        if folders and not name.startswith(folders):
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if pattern.search(line):
                yield f"{name}:{number}: {line.strip()[:100]}"


def test_no_package_registry_is_named():
    assert list(lines(re.compile("|".join(map(re.escape, REGISTRIES))))) == []


def test_no_path_of_a_machine_is_named():
    assert list(lines(MACHINE_PATHS)) == []


def test_nothing_is_left_unfinished():
    assert list(lines(UNFINISHED, "src/", "benchmarks/")) == []


def test_lock_files_hold_no_addresses():
    locks = [path for path in TEXTS if path.suffix == ".lock"]
    assert locks
    assert [path.name for path in locks if "://" in TEXTS[path]] == []


def test_no_file_is_large():
    ours = [path for path in FILES if path.suffix != ".lock"]  # as long as what is pinned is many
    limits = {".webp": ANIMATION_BYTES_MAX}
    assert [str(path) for path in ours if path.stat().st_size > limits.get(path.suffix, BYTES_MAX)] == []


def python(*, containing: str = "") -> Iterator[tuple[Path, ast.Module]]:
    """The Python files whose text contains ``containing``: parsing all of them takes long."""
    for path, text in TEXTS.items():
        if path.suffix == ".py" and containing in text:
            yield path, ast.parse(text)


def test_no_test_sleeps():
    """Waiting is for `eventually` and `throughout`. A sleep of 0 lets others run; virtual time costs none;
    one that sets the pace of a workload says so: ``# pace``."""
    actual = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, tree in python(containing="sleep(")
        if path.is_relative_to(ROOT / "tests")
        and not path.is_relative_to(ROOT / "tests" / "sim")  # all of it runs in virtual time
        and not re.search("virtual_time|run_virtual|VirtualLoop", TEXTS[path])
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", getattr(node.func, "id", "")) == "sleep"
        and ast.unparse(node.func) in ("time.sleep", "asyncio.sleep", "sleep")
        and not (isinstance(node.args[0], ast.Constant) and node.args[0].value == 0)
        and "# pace" not in TEXTS[path].splitlines()[node.lineno - 1]
    ]
    assert actual == []


def test_nothing_is_raised_in_a_star_handler():
    """Python 3.11.0 to 3.11.3 wrap it in a group, and callers who expect one of our errors miss it."""
    actual = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, tree in python(containing="except*")
        for tried in ast.walk(tree)
        if isinstance(tried, ast.TryStar)
        for handler in tried.handlers
        for node in ast.walk(handler)
        if isinstance(node, ast.Raise) and node.exc is not None
    ]
    assert actual == []


def test_a_packages_init_file_contains_only_a_docstring():
    # The public names, and the one that Spark looks for.
    allowed = {ROOT / "src" / name / "__init__.py" for name in ("muster", "pyspark_muster")}
    wordy = [
        str(path.relative_to(ROOT))
        for path, text in TEXTS.items()
        if path.name == "__init__.py"
        and path.is_relative_to(ROOT / "src")
        and path not in allowed
        and (ast.get_docstring(tree := ast.parse(text)) is None or len(tree.body) != 1)
    ]
    assert wordy == []


def test_every_module_has_a_docstring():
    silent = [
        str(path.relative_to(ROOT))
        for path, text in TEXTS.items()
        if path.suffix == ".py"
        and (path.is_relative_to(ROOT / "src") or path.is_relative_to(ROOT / "benchmarks"))
        and not text.lstrip().startswith(('"""', 'r"""'))
    ]
    assert silent == []


LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", [path for path in TEXTS if path.suffix == ".md"], ids=lambda path: path.name)
def test_links_in_texts_lead_somewhere(page: Path):
    targets = [target for target in LINK.findall(TEXTS[page]) if "://" not in target]
    assert [target for target in targets if not (page.parent / target).exists()] == []

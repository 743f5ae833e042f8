"""Mutation testing of the deciding cores: ``python -m tools.mutants PACKAGE [MODULE …]``.

Each module is changed in one place at a time (a comparison, a boolean, a number, a call left out), and the
package's fast tests are run against the change.  A mutant that no test notices survives: either a test is
missing, or the change makes no difference.  In the second case the line and the argument stand in
``tools/equivalent.toml``, and the line is left out.

The mutants of a module are a seeded sample, so two runs look at the same ones.

One process imports everything that does not import the module, and forks for each mutant: the fork executes
the mutant in place of the module, then pytest runs there.  The quickest tests run first, up to the first
failure; Hypothesis neither shrinks nor varies.  Processes that a test starts run the code without the change.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import datetime
import importlib
import importlib.util
import itertools
import math
import multiprocessing
import os
import pathlib
import random
import re
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import hypothesis
import pytest

ROOT = pathlib.Path(__file__).parent.parent
MUTANTS = 60
SEED = 1
PACKAGE_S_MAX = 1800.0
SURVIVORS_MAX = 0.10
HANGS_S = 5.0
EQUIVALENT = pathlib.Path(__file__).with_name("equivalent.toml")
FORK = multiprocessing.get_context("fork")

_T = TypeVar("_T")

#: By package: the deciding modules, and the tests that have to notice a change of each.
CORES: dict[str, dict[str, tuple[str, ...]]] = {
    "manage": {
        "manage/manager/reconciler.py": (
            "tests/manage/test_reconcile.py",
            "tests/manage/test_reconcile_cases.py",
            "tests/manage/test_reconcile_model.py",
        ),
        "manage/registry/assignments.py": (
            "tests/manage/test_processor.py",
            "tests/manage/test_processor_verbs.py",
            "tests/manage/test_registry.py",
            "tests/manage/test_registry_model.py",
        ),
        "manage/registry/agent_selection.py": ("tests/manage/test_placement.py",),
    },
    "bus": {
        "bus/lease_state.py": (
            "tests/bus/test_tenure.py",
            "tests/bus/test_leases.py",
            "tests/bus/test_simulated_leases.py",
        )
    },
    "message": {
        "message/dispatcher/backlog.py": (
            "tests/message/test_backlog.py",
            "tests/message/test_backlog_cases.py",
            "tests/message/test_index.py",
            "tests/message/test_selector_lines.py",
            "tests/message/test_races.py",
        ),
        "message/dispatcher/index/selector_lines.py": (
            "tests/message/test_selector_lines.py",
            "tests/message/test_index.py",
            "tests/message/test_backlog.py",
        ),
        "message/dispatcher/index/sorted_numbers.py": ("tests/message/test_index.py",),
        "message/dispatcher/log/ledger.py": (
            "tests/message/test_ledger.py",
            "tests/message/test_backlog.py",
            "tests/message/test_races.py",
        ),
        "message/dispatcher/peers/transactions.py": (
            "tests/message/test_peer_transactions.py",
            "tests/message/test_partitions.py",
        ),
    },
    "inform": {
        "inform/node/writes.py": ("tests/inform/test_writes.py", "tests/inform/test_repeats.py"),
        "inform/node/primary.py": ("tests/inform/test_writes.py", "tests/inform/test_repeats.py"),
        "inform/node/replicas/placement.py": ("tests/inform/test_decisions.py",),
    },
    "monitor": {
        "monitor/channel/aggregator.py": (
            "tests/monitor/test_aggregator.py",
            "tests/monitor/test_aggregator_rules.py",
        ),
    },
    "pipeline": {
        "pipeline/fleet/state.py": ("tests/pipeline/test_fleet.py", "tests/pipeline/test_fleet_rules.py"),
        "pipeline/fleet/node_rules.py": (
            "tests/pipeline/test_fleet.py",
            "tests/pipeline/test_fleet_rules.py",
        ),
        "pipeline/alerts/tracker.py": ("tests/pipeline/test_alerts.py", "tests/pipeline/test_alert_rules.py"),
    },
    "notify": {
        "notify/matcher/matcher.py": ("tests/notify/test_engine.py", "tests/notify/test_engine_rules.py"),
        "notify/authorities.py": ("tests/notify/test_authorities.py",),
    },
    "trust": {"trust/grants.py": ("tests/trust/test_grants.py", "tests/trust/test_grant_rules.py")},
    "core": {"core/duplicates.py": ("tests/core/test_duplicates.py", "tests/monitor/test_aggregator.py")},
}

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """``place``: of the changed node in `ast.walk`; ``variant``: which of its possible changes."""

    line: int
    what: str
    place: int
    variant: int


def equivalents() -> dict[str, dict[str, str]]:
    """By module: lines, and why a change of them makes no difference."""
    lines: dict[str, dict[str, str]] = tomllib.loads(EQUIVALENT.read_text())
    return lines


def mutants(source: str, equivalent: Mapping[str, str]) -> list[Mutant]:
    """All of a module; texts, annotations, options of classes and equivalent lines are left alone."""
    tree = ast.parse(source)
    lines = [line.partition("  #")[0].strip() for line in source.splitlines()]
    inert = _annotations(tree) | _options(tree)
    return [
        Mutant(node.lineno, what, place, variant)
        for place, node in enumerate(ast.walk(tree))
        if isinstance(node, ast.stmt | ast.expr) and id(node) not in inert
        for variant, (what, _) in enumerate(_changes(node))
        if not _is_equivalent(equivalent.get(lines[node.lineno - 1]), what)
    ]


def _is_equivalent(why: str | None, what: str) -> bool:
    only = re.match(r"\((.*?)\): ", why or "")
    return why is not None and (only is None or what in only[1].split(", "))


def changed(source: str, mutant: Mutant | None) -> ast.Module:
    """The module with that one change."""
    tree = ast.parse(source)
    if mutant is not None:
        node = next(itertools.islice(ast.walk(tree), mutant.place, None))
        _, apply = list(_changes(node))[mutant.variant]
        apply()
    return ast.fix_missing_locations(tree)


def _annotations(tree: ast.AST) -> set[int]:
    """The ids of all nodes within annotations: changing them changes nothing."""
    roots = [
        getattr(node, name)
        for node in ast.walk(tree)
        for name in ("annotation", "returns")
        if getattr(node, name, None) is not None
    ]
    return {id(node) for root in roots for node in ast.walk(root)}


def _options(tree: ast.AST) -> set[int]:
    """The ids of all nodes within a class's keywords and decorators, such as ``frozen=True``."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    roots = [root for node in classes for root in (*node.keywords, *node.decorator_list)]
    return {id(node) for root in roots for node in ast.walk(root)}


def _changes(node: ast.AST) -> Iterator[tuple[str, Callable[[], None]]]:
    """What may be changed in one node: a description, and a function that changes it."""

    def setting(name: str, value: object) -> Callable[[], None]:
        return lambda: setattr(node, name, value)

    match node:
        case ast.Compare(ops=[operator]) if type(operator) in _COMPARISONS:
            other = _COMPARISONS[type(operator)]
            yield f"{type(operator).__name__} -> {other.__name__}", setting("ops", [other()])
        case ast.BoolOp(op=ast.And()):
            yield "and -> or", setting("op", ast.Or())
        case ast.BoolOp(op=ast.Or()):
            yield "or -> and", setting("op", ast.And())
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "not removed", setting("operand", ast.UnaryOp(ast.Not(), operand))
        case ast.BinOp(op=operator) | ast.AugAssign(op=operator) if type(operator) in _OPERATORS:
            other_operator = _OPERATORS[type(operator)]
            yield f"{type(operator).__name__} -> {other_operator.__name__}", setting("op", other_operator())
        case ast.Constant(value=bool(value)):
            yield f"{value} -> {not value}", setting("value", not value)
        case ast.Constant(value=int(number)):
            yield f"{number} -> {number + 1}", setting("value", number + 1)
        case ast.Call(func=ast.Name(id=name) as called) if name in _CALLS:
            yield f"{name} -> {_CALLS[name]}", lambda: setattr(called, "id", _CALLS[name])
        case ast.If(test=test):
            yield "condition negated", setting("test", ast.UnaryOp(ast.Not(), test))
        case ast.Expr(value=ast.Call()):
            yield "call left out", setting("value", ast.Constant(None))
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield "returns None", setting("value", ast.Constant(None))


@dataclass(eq=False)
class Run:
    """A run of the tests, as their plugin."""

    usual_s: dict[str, float]  # by test: the quickest first; one that takes far longer hangs
    passed: bool = False
    took_s: dict[str, float] = field(default_factory=lambda: collections.defaultdict(float))
    imported: list[str] = field(default_factory=list)

    def pytest_collection(self) -> None:
        phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
        hypothesis.settings.register_profile("mutants", phases=phases, derandomize=True)
        hypothesis.settings.load_profile("mutants")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: self.usual_s.get(item.nodeid, math.inf))
        for item in items:
            if item.nodeid in self.usual_s:
                item.add_marker(pytest.mark.timeout(HANGS_S + 10 * self.usual_s[item.nodeid]), append=False)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.took_s[report.nodeid] += report.duration


def run(tests: tuple[str, ...], usual_s: dict[str, float]) -> Run:
    """In a process of its own, which pytest may change as it likes."""
    _silence()
    result = Run(usual_s)
    options = ("-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist")
    already_imported = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
    result.passed = pytest.main([*options, *already_imported, *tests], plugins=[result]) == 0
    result.imported = [name for name in sys.modules if not name.startswith(("tests", "__"))]
    return result


def run_mutant(module: str, mutant: Mutant | None, tests: tuple[str, ...], usual_s: dict[str, float]) -> Run:
    _silence()
    name, path = _name(module), ROOT / "src" / "muster" / module
    package, _, leaf = name.rpartition(".")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    made = importlib.util.module_from_spec(spec)
    code = compile(changed(path.read_text(), mutant), path, "exec")
    setattr(importlib.import_module(package), leaf, made)
    sys.modules[name] = made
    exec(code, made.__dict__)
    return run(tests, usual_s)


def _silence() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def _name(module: str) -> str:
    return "muster." + module.removesuffix(".py").replace("/", ".")


def forked(limit_s: float, function: Callable[..., _T], *arguments: Any) -> _T | None:
    """What ``function`` returns in a fork; None where it fails or takes too long."""
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=lambda: sender.send(function(*arguments)))
    process.start()
    sender.close()
    result: _T | None = None
    with receiver, contextlib.suppress(EOFError):
        if receiver.poll(limit_s):
            result = receiver.recv()
            process.join(10)
    process.kill()
    process.join()
    return result


def warm(module: str, imported: list[str]) -> None:
    """Import all of these that do not import the module."""
    name = _name(module)
    sys.modules[name] = None  # type: ignore[assignment]  # to import it fails
    for module_name in imported:
        with contextlib.suppress(Exception):
            importlib.import_module(module_name)
    del sys.modules[name]


def examine(
    module: str, tests: tuple[str, ...], count: int, seed: int, lines: list[int], ends_s: float
) -> tuple[int, int]:
    """How many were tried and how many survived; survivors are printed. In a process of its own."""
    missing = [test for test in tests if not (ROOT / test).exists()]
    if missing:
        raise SystemExit(f"{module}: {', '.join(missing)} does not exist")
    first = forked(600, run, tests, {})
    if first is None or not first.passed:
        raise SystemExit(f"{module}: its tests fail without any change: {' '.join(tests)}")
    warm(module, first.imported)
    began_s = time.monotonic()
    second = forked(600, run_mutant, module, None, tests, first.took_s)
    if second is None or not second.passed:
        raise SystemExit(f"{module}: its tests fail in another order: {' '.join(tests)}")
    limit_s = 30 + 4 * (time.monotonic() - began_s)
    every = mutants((ROOT / "src" / "muster" / module).read_text(), equivalents().get(module, {}))
    chosen = random.Random(seed).sample(every, min(count, len(every)))
    tried = survived = 0
    for mutant in sorted(chosen, key=lambda value: value.line):
        if (lines and mutant.line not in lines) or time.monotonic() > ends_s:
            continue
        result = forked(limit_s, run_mutant, module, mutant, tests, second.took_s)
        tried += 1
        if result is not None and result.passed:
            survived += 1
            print(f"  survives: src/muster/{module}:{mutant.line}: {mutant.what}", flush=True)
    print(f"{module}: {survived} of {tried} survive (of {len(every)} possible, seed {seed})", flush=True)
    return tried, survived


def main() -> int:
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__.splitlines()[0])
    parser.add_argument("package", choices=sorted(CORES))
    parser.add_argument(
        "modules", nargs="*", help="some of the package's cores, such as manage/manager/reconciler.py"
    )
    parser.add_argument("--count", type=int, default=MUTANTS, help="mutants of each module")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--lines", type=int, nargs="+", default=[], help="of these, those on some lines only")
    parser.add_argument(
        "--summary", action="store_true", help="also print Markdown rows: date, module, mutants, survivors"
    )
    arguments = parser.parse_args()
    ends_s = time.monotonic() + PACKAGE_S_MAX
    counts: dict[str, tuple[int, int]] = {}
    for module, tests in CORES[arguments.package].items():
        if arguments.modules and module not in arguments.modules:
            continue
        result = forked(
            PACKAGE_S_MAX * 2,
            examine,
            module,
            tests,
            arguments.count,
            arguments.seed,
            arguments.lines,
            ends_s,
        )
        if result is None:
            return 1
        counts[module] = result
    if arguments.summary:
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        for module, (tried, survived) in counts.items():
            print(f"| {today} | `{module}` | {tried} | {survived} |")
    tried, survived = (sum(column) for column in zip((0, 0), *counts.values(), strict=True))
    share = survived / tried if tried else 0.0
    print(
        f"{arguments.package}: {survived} of {tried} mutants survive "
        f"({share:.0%}; at most {SURVIVORS_MAX:.0%})"
    )
    return int(share > SURVIVORS_MAX)


if __name__ == "__main__":
    sys.exit(main())

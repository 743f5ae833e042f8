"""Mutation testing of the deciding cores: ``python -m tools.mutants PACKAGE [MODULE …]``.

Each module is changed in one place at a time (a comparison, a boolean, a number, a call left out), and the
package's fast tests are run against the change.  A mutant that no test notices survives: either a test is
missing, or the change makes no difference.  In the second case the argument stands beside the code, in a
comment ``# equivalent: why`` on the line, and the line is left out.

The mutants of a module are a seeded sample, so two runs look at the same ones.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import copy
import itertools
import os
import pathlib
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).parent.parent
MUTANTS = 60
SEED = 1
PACKAGE_S_MAX = 1800.0
SURVIVORS_MAX = 0.10
EQUIVALENT = "# equivalent:"

#: By package: the deciding modules, and the tests that have to notice a change of each.
CORES: dict[str, dict[str, tuple[str, ...]]] = {
    "manage": {
        "manage/reconcile.py": ("tests/manage/test_reconcile.py", "tests/manage/test_reconcile_model.py"),
        "manage/processor.py": ("tests/manage/test_registry.py", "tests/manage/test_registry_model.py"),
        "manage/placement.py": ("tests/manage/test_placement.py",),
    },
    "bus": {"bus/tenure.py": ("tests/bus/test_leases.py", "tests/bus/test_simulated_leases.py")},
    "message": {
        "message/backlog.py": ("tests/message/test_backlog.py", "tests/message/test_races.py"),
        "message/ledger.py": ("tests/message/test_backlog.py", "tests/message/test_races.py"),
    },
    "inform": {
        "inform/writing.py": ("tests/inform/test_repeats.py", "tests/inform/test_writing_model.py"),
        "inform/placement.py": ("tests/inform/test_decisions.py",),
    },
    "monitor": {"monitor/aggregator.py": ("tests/monitor/test_aggregator.py",)},
    "pipeline": {
        "pipeline/fleet.py": ("tests/pipeline/test_fleet.py", "tests/pipeline/test_alert_model.py"),
        "pipeline/machines.py": ("tests/pipeline/test_fleet.py", "tests/pipeline/test_alert_model.py"),
        "pipeline/alerts.py": ("tests/pipeline/test_alerts.py", "tests/pipeline/test_alert_model.py"),
    },
    "notify": {
        "notify/engine.py": ("tests/notify/test_engine.py",),
        "notify/known.py": ("tests/notify/test_believing.py", "tests/notify/test_scopes.py"),
    },
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
    line: int
    what: str
    source: str


def mutants(source: str) -> list[Mutant]:
    """All of a module; texts, annotations and lines with an argument for equivalence are left alone."""
    tree = ast.parse(source)
    argued = {number for number, line in enumerate(source.splitlines(), 1) if EQUIVALENT in line}
    types = _annotations(tree)
    found = []
    for place, node in enumerate(ast.walk(tree)):
        line = getattr(node, "lineno", 0)
        if line in argued or id(node) in types:
            continue
        for variant, (what, _) in enumerate(_changes(node)):
            changed = copy.deepcopy(tree)
            target = next(itertools.islice(ast.walk(changed), place, None))
            _, apply = list(_changes(target))[variant]
            apply()
            found.append(Mutant(line, what, ast.unparse(ast.fix_missing_locations(changed))))
    return found


def _annotations(tree: ast.AST) -> set[int]:
    """The ids of all nodes within annotations: changing them changes nothing."""
    roots = [
        getattr(node, name)
        for node in ast.walk(tree)
        for name in ("annotation", "returns")
        if getattr(node, name, None) is not None
    ]
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


async def survives(mutant: Mutant, module: str, tests: tuple[str, ...], limit_s: float) -> bool:
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        source = pathlib.Path(folder) / "src"
        await asyncio.to_thread(shutil.copytree, ROOT / "src", source)
        (source / "muster" / module).write_text(mutant.source)
        return await passes(source, tests, limit_s)


async def passes(source: pathlib.Path, tests: tuple[str, ...], limit_s: float) -> bool:
    arguments = ("-x", "-q", "-p", "no:cacheprovider", "-o", f"pythonpath={source} .", *tests)
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pytest", *arguments),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(source)},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(limit_s):
            return await child.wait() == 0
    except TimeoutError:  # it hangs: noticed
        child.kill()
        await child.wait()
        return False


async def examine(
    module: str, tests: tuple[str, ...], count: int, seed: int, ends_s: float
) -> tuple[int, int]:
    """How many were tried and how many survived; survivors are printed."""
    missing = [test for test in tests if not (ROOT / test).exists()]
    if missing:
        raise SystemExit(f"{module}: {', '.join(missing)} does not exist")
    began_s = time.monotonic()
    if not await passes(ROOT / "src", tests, 600):
        raise SystemExit(f"{module}: its tests fail without any change: {' '.join(tests)}")
    limit_s = 30 + 4 * (time.monotonic() - began_s)
    every = mutants((ROOT / "src" / "muster" / module).read_text())
    chosen = random.Random(seed).sample(every, min(count, len(every)))
    gate = asyncio.Semaphore(os.cpu_count() or 1)
    tried = survived = 0

    async def one(mutant: Mutant) -> None:
        nonlocal tried, survived
        async with gate:
            if time.monotonic() > ends_s:
                return
            tried += 1
            if await survives(mutant, module, tests, limit_s):
                survived += 1
                print(f"  survives: src/muster/{module}:{mutant.line}: {mutant.what}", flush=True)

    await asyncio.gather(*(one(mutant) for mutant in sorted(chosen, key=lambda one: one.line)))
    print(f"{module}: {survived} of {tried} survive (of {len(every)} possible, seed {seed})", flush=True)
    return tried, survived


async def main() -> int:
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__.splitlines()[0])
    parser.add_argument("package", choices=sorted(CORES))
    parser.add_argument("modules", nargs="*", help="some of the package's cores, such as manage/reconcile.py")
    parser.add_argument("--count", type=int, default=MUTANTS, help="mutants of each module")
    parser.add_argument("--seed", type=int, default=SEED)
    given = parser.parse_args()
    ends_s = time.monotonic() + PACKAGE_S_MAX
    tried = survived = 0
    for module, tests in CORES[given.package].items():
        if not given.modules or module in given.modules:
            results = await examine(module, tests, given.count, given.seed, ends_s)
            tried, survived = tried + results[0], survived + results[1]
    share = survived / tried if tried else 0.0
    print(
        f"{given.package}: {survived} of {tried} mutants survive ({share:.0%}; at most {SURVIVORS_MAX:.0%})"
    )
    return int(share > SURVIVORS_MAX)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))

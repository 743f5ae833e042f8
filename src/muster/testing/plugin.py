"""The pytest plugin of `muster.testing`.

Every installation of Muster provides its fixtures (`muster.testing.fixtures`) and these markers.  The
following rules apply only if the project's pytest settings contain ``muster_strict = true``, as ours do:

- a test that leaves a task, a thread, an open file or socket, or a child process behind fails;
- Muster's code may not block the event loop (`muster.testing.blocking_calls`);
- a skip needs a reason, and under ``CI=true`` a missing dependency is a failure, not a skip.

Markers:

    virtual_time                    run this test in virtual time (`muster.testing.virtual_clock`)
    may_leak(kind, …, reason=…)     kinds: tasks, loop-errors, threads, files, processes
    may_block(reason=…)             this test may block its own event loop
"""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from muster.testing import blocking_calls, failure_logs, leaks

LEAK_KINDS = frozenset({"tasks", "loop-errors", "threads", "files", "processes"})

_BASELINE = pytest.StashKey[leaks.OpenResources]()
_ASYNC = importlib.util.find_spec("pytest_asyncio") is not None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("muster_strict", "leaks and a blocked event loop fail a test", type="bool", default=False)
    group = parser.getgroup("muster")
    group.addoption("--muster-seed", type=int, help="seed of simulated networks")
    group.addoption(
        "--muster-domain",
        default=os.environ.get("MUSTER_TEST_DOMAIN", ""),
        help="a home or a profile: the fixture `domain` is this real domain (also MUSTER_TEST_DOMAIN)",
    )


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell that starts tests in the background makes them, and their children, ignore SIGINT:
        # a test that sends it would wait forever.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for line in (
        "virtual_time: run in virtual time, where nothing waits and no socket opens",
        "may_leak(*kinds, reason): what this test may leave behind, and why",
        "may_block(reason): this test may block its event loop, and why",
    ):
        config.addinivalue_line("markers", line)
    if _ASYNC:
        from muster.testing import fixtures, loops

        config.pluginmanager.register(fixtures, fixtures.__name__)
        config.pluginmanager.register(loops, loops.__name__)
    if strict(config):
        leaks.adopt_orphans()
        config.add_cleanup(blocking_calls.forbid())


def real_domain(config: pytest.Config) -> dict[str, str]:
    """Where `muster.open` finds the domain that stands in for those in memory; empty: nowhere."""
    name = str(config.getoption("muster_domain"))
    return {"home" if Path(name).is_dir() else "profile": name} if name else {}


def strict(config: pytest.Config) -> bool:
    return bool(config.getini("muster_strict"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    if strict(item.config):
        item.config.stash[_BASELINE] = leaks.snapshot()
    yield


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """What a fixture of a wider scope opens is not a leak of the test."""
    baseline = request.config.stash.get(_BASELINE, None)
    if baseline is None or request.scope == "function":
        return (yield)
    before = leaks.snapshot()
    try:
        return (yield)
    finally:
        request.config.stash[_BASELINE] = baseline.plus(leaks.snapshot().minus(before))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    yield
    if not strict(item.config):
        return
    left = leaks.leaked(item.config.stash[_BASELINE], ignore=may_leak(item))
    if left:
        pytest.fail("this test left behind:\n  " + "\n  ".join(left), pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    mark = item.get_closest_marker("may_block")
    if mark is None:
        return (yield)
    _need_reason(mark)
    with blocking_calls.allowed():
        return (yield)


def may_leak(item: pytest.Item) -> frozenset[str]:
    kinds: set[str] = set()
    for mark in item.iter_markers("may_leak"):
        _need_reason(mark)
        if unknown := set(mark.args) - LEAK_KINDS:
            raise pytest.UsageError(f"may_leak accepts {sorted(LEAK_KINDS)}, not {sorted(unknown)}")
        kinds.update(mark.args)
    return frozenset(kinds)


def _need_reason(mark: pytest.Mark) -> None:
    if not mark.kwargs.get("reason"):
        raise pytest.UsageError(f"{mark.name} needs a reason: @pytest.mark.{mark.name}(…, reason='…')")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        failure_logs.show(item, report)
    # xdist sends reports as UTF-8: a surrogate in what a test logged would end its worker.
    report.sections = [
        (title, text.encode(errors="backslashreplace").decode()) for title, text in report.sections
    ]
    if strict(item.config) and report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped").strip(": ")
        if reason in ("", "unconditional skip"):
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid} was skipped without a reason"
    return report


def require_part(part: str, present: object, *, hint: str) -> None:
    """Continue if ``present``; otherwise skip the test with a reason, or fail it under ``CI=true``.

    ``hint`` describes how to install the dependency.
    """
    if present:
        return
    message = f"missing dependency: {part}; {hint}"
    if os.environ.get("CI", "").lower() in ("1", "true", "yes"):
        pytest.fail(f"{message} (never skipped in CI)", pytrace=False)
    pytest.skip(message)

"""How tests are spread over workers (``pytest -n 3``).

Tests of a file stay on one worker. So do all files that share a session fixture which takes long to start:
one worker starts it, once. Files with long tests (``@pytest.mark.timeout``) begin first, then those that the
fast tier leaves out, so that none of them runs alone at the end.
"""

from __future__ import annotations

import collections
import functools
import re
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import loadscope

from tests import tiers

ROOT = Path(__file__).parents[1]
#: Folders, and the session fixtures that their files share: Spark; a domain with a web server, and a browser.
SHARING = {"tests/pipeline/": "spark", "tests/web/": "lab|admin|olga|vera|visit|furnished"}
#: Tests that are independent of each other: one for each page, one for each command.
APART = ("tests/docs/test_blocks.py", "tests/cli/test_running_sweep.py")


@functools.cache
def _shares(file: str, fixtures: str) -> bool:
    return re.search(rf"def \w+\([^)]*\b({fixtures})\b", (ROOT / file).read_text()) is not None


def unit(nodeid: str) -> str:
    """The tests with the same result run on one worker."""
    file = nodeid.partition("::")[0]
    if file in APART:
        return nodeid
    shared = (
        folder for folder, fixtures in SHARING.items() if file.startswith(folder) and _shares(file, fixtures)
    )
    return next(shared, file)


class Scheduling(loadscope.LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return unit(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    if config.getoption("dist") != "load":  # other tests were selected
        return None
    config.option.loadscopereorder = False  # in the order of collection, which is ours
    return Scheduling(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not hasattr(config, "workerinput"):
        return
    patience_s: dict[str, float] = collections.defaultdict(float)
    for item in items:
        mark = item.get_closest_marker("timeout")
        name = unit(item.nodeid)
        patience_s[name] = max(patience_s[name], mark.args[0] if mark is not None else 0)
    many = collections.Counter(unit(item.nodeid) for item in items)

    def rank(item: pytest.Item) -> tuple[float, bool, int]:
        name = unit(item.nodeid)
        return -patience_s[name], not tiers.is_left_out(item.nodeid.partition("::")[0]), -many[name]

    items.sort(key=rank)

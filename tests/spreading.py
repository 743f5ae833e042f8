"""How tests are spread over workers (``pytest -n 3``).

Those of a file stay together, and those of a folder whose tests share something that takes long to start: so
it is started once, and not by every worker.  Whatever is given long (``@pytest.mark.timeout``) begins first:
none of it is left to run alone at the end.
"""

from __future__ import annotations

import collections

import pytest
from xdist.remote import Producer
from xdist.scheduler import loadscope

SHARING = ("tests/pipeline/", "tests/web/")  # one Spark; one domain with its web server and a browser
APART = ("tests/docs/test_blocks.py",)  # each page is a story of its own


def unit(nodeid: str) -> str:
    """What goes to one worker as a whole."""
    file = nodeid.partition("::")[0]
    if file in APART:
        return nodeid
    return next((folder for folder in SHARING if file.startswith(folder)), file)


class Scheduling(loadscope.LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return unit(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    if config.getoption("dist") != "load":  # something else was asked for
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

    def rank(item: pytest.Item) -> tuple[float, int]:
        name = unit(item.nodeid)
        return -patience_s[name], -many[name]

    items.sort(key=rank)

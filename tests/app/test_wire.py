"""The reference of subjects and messages is complete."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from muster.core import subjects
from muster.message import listings
from tools.reference import wire

SOURCE = Path(__file__).parents[2] / "src" / "muster"
NAMES = {"subject": "topic.a", "kind": "poke"}  # of those that cannot have just any name
MODULES = [module for modules in wire.PARTS.values() for module in modules]


def test_the_page_has_every_subject_and_message():
    page = wire.render_page()
    listed = [entry for module in MODULES for entry in wire.subjects_of(module)]
    assert len(listed) > 60
    patterns = [entry.pattern.replace("|", "\\|") for entry in listed]
    assert [pattern for pattern in patterns if f"| `{pattern}` |" not in page] == []
    kinds = [kind for module in (*MODULES, *wire.SHARED) for kind in wire.structs_of(module)]
    assert [kind.__name__ for kind in kinds if f"\n**{kind.__name__}**" not in page] == []


def test_every_protocol_is_on_it():
    protocols = {f"muster.{path.parent.name}.protocol" for path in SOURCE.glob("*/protocol.py")}
    assert protocols <= {module.__name__ for module in MODULES}


def test_what_a_viewer_and_an_agent_may_say_follows_from_the_roles():
    assert wire.publishers("muster.manage.from.<user>.read.<verb>") == "all, as themselves"
    assert wire.publishers("muster.manage.from.<user>.request.<verb>") == "all except viewers, as themselves"
    assert wire.publishers("muster.notify.to.<process>.event") == "notifier"
    assert wire.subscribers("muster.monitor.from.<sensor>.report.<channel>") == "channel, pipeline"
    assert wire.subscribers("muster.manage.all.state.<resource>") == "all"


def built(module: ModuleType) -> Iterator[tuple[str, str]]:
    """The subjects that a module's functions of names build, with a name in every place."""
    for name, function in inspect.getmembers(module, inspect.isfunction):
        signature = inspect.signature(function)
        plain = all(parameter.annotation == "str" for parameter in signature.parameters.values())
        if function.__module__ != module.__name__ or not plain or signature.return_annotation != "str":
            continue
        made = function(*(NAMES.get(parameter, "x") for parameter in signature.parameters))
        if made.startswith("muster."):
            yield name, made


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_subject_that_a_protocol_builds_is_listed(module):
    listed = [entry.pattern for several in MODULES for entry in wire.subjects_of(several)]
    assert wire.subjects_of(module) or module is listings, f"{module.__name__} lists no subjects"
    patterns = []
    for item in listed:
        for variant in (re.sub(r"\[[^\]]*\]", "", item), re.sub(r"[\[\]]", "", item)):
            wild = re.sub(r"<topic's subject>", ">", variant)
            wild = re.sub(r"\{[^}]*\}", "*", wild)
            patterns.append(re.sub(r"<[^>]*>", "*", wild))
    missing = {
        name: made
        for name, made in built(module)
        if not any(subjects.matches(pattern, made) for pattern in patterns)
    }
    assert not missing

"""The reference of subjects and messages is complete and equal to the code."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from muster.core import subjects
from muster.message import listings
from tools.reference import wire

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "wire.md"
SOURCE = Path(__file__).parents[2] / "src" / "muster"
NAMES = {"subject": "topic.a", "kind": "poke"}  # of those that cannot have just any name
MODULES = [module for modules in wire.PARTS.values() for module in modules]


def test_the_page_is_made_from_the_code():
    made = wire.render_page()
    if os.environ.get("REWRITE"):
        PAGE.write_text(made)
    assert PAGE.read_text() == made, "REWRITE=1 pytest tests/app/test_wire.py writes it anew"


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

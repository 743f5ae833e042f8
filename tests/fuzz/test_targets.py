"""A short run of every fuzz target, and the inputs that once failed. `make fuzz` runs a million of each."""

from __future__ import annotations

import json
import random

import pytest

from muster.core import errors
from muster.core.formats import yaml
from tests.fuzz import mutations, result, targets
from tools import site

INPUTS = 150

FLEET = targets.TARGETS["fleet_state"].seeds[0]


def flipped(data: bytes, at: int, bits: int) -> bytes:
    return data[:at] + bytes([data[at] ^ bits]) + data[at + 1 :]


#: Inputs that crashed, took seconds or raised an undocumented error, by target.
REGRESSIONS: dict[str, tuple[bytes, ...]] = {
    "report_arrow": (flipped(targets.TARGETS["report_arrow"].seeds[0], 4594, 0x80),),  # SIGSEGV in `nbytes`
    "settings_file": (
        b"[pipeline]\nhistory_dir = '~no-such-user'\n",
        b"[domain]\ndata_dir = '~no-such-user'\n",
    ),
    "dispatcher_request": (b"\x82\xa7request\xa5\xaaello\xaaconnection\xa3a-b",),
    "log_page": (b"\x92\xc0\x91\x92\xa2{\x91\xc4\x01x",),
    "fleet_state": (
        *(FLEET[:-20], FLEET[:-2] + b"\xc0\x00", FLEET.replace(b'\x04"M\x18', b'\x04"M\x19')),
        FLEET.replace(b"<f8", b"(,f"),  # NumPy would evaluate it
        FLEET.replace(b"\x03\x92\xa3web", b"\xff\x92\xa3web"),  # -1 machines
    ),
    **dict.fromkeys(
        ("manifest_file", "rule_file", "response_file", "reaction_file", "notify_document"), (b"[" * 4000,)
    ),
}


def test_the_page_shows_the_stored_results():
    assert result.markdown(json.loads(result.FILE.read_text())) in site.text_of("testing.md")


def test_deeply_nested_yaml_is_refused_at_once():
    with pytest.raises(errors.InvalidInput, match="brackets are nested deeper than 100"):
        yaml.read("a: " + "[" * 1_000_000, "a file")
    assert yaml.read("[" * 100 + "]" * 100, "a file")


@pytest.mark.parametrize("name", sorted(targets.TARGETS))
def test_only_documented_errors_are_raised(name: str):
    seeds = targets.TARGETS[name].seeds
    for data in (b"", *seeds, *REGRESSIONS.get(name, ())):
        targets.run(name, data)
    chance = random.Random(name)
    for _ in range(INPUTS):
        data = mutations.mutate(chance, seeds)
        try:
            targets.run(name, data)
        except Exception as error:
            error.add_note(f"the input: {data!r}")
            raise

"""The private names of python-qpid-proton that the AMQP gateway relies on.

`muster.gateways.amqp.protocol.proton` calls the C functions of the engine through the cffi module of the
package, and uses the pointer behind a wrapper (``_impl``) as its key.  pyproject.toml excludes the next minor
version; this test shows what has moved before it is admitted.
"""

from __future__ import annotations

import importlib.metadata
import pathlib
import tomllib

import pytest

proton = pytest.importorskip("proton", reason="the AMQP engine is not installed")

ROOT = pathlib.Path(__file__).parents[3]
FUNCTIONS = [
    "pn_collector_peek",
    "pn_collector_pop",
    "pn_event_link",
    "pn_event_type",
    "pn_transport_capacity",
    "pn_transport_peek",
    "pn_transport_pending",
    "pn_transport_pop",
    "pn_transport_push",
]
CONSTANTS = ["PN_DELIVERY", "PN_LINK_FLOW", "PN_TRANSPORT"]


def test_the_c_functions_exist():
    import cproton_ffi

    assert [name for name in FUNCTIONS if not callable(getattr(cproton_ffi.lib, name, None))] == []
    assert [name for name in CONSTANTS if not isinstance(getattr(cproton_ffi.lib, name, None), int)] == []
    source = (ROOT / "src/muster/gateways/amqp/protocol/proton.py").read_text()
    used = {part.split("(")[0].split(")")[0].split(",")[0].strip() for part in source.split("lib.")[1:]}
    assert used <= {*FUNCTIONS, *CONSTANTS}, "a new use of the C interface: add it to the lists here"


def test_wrappers_show_their_pointer_and_take_one():
    import cproton_ffi

    connection, collector = proton.Connection(), proton.Collector()
    connection.collect(collector)
    transport = proton.Transport(proton.Transport.SERVER)
    transport.bind(connection)
    link = connection.session().sender("link")
    assert hash(link._impl) == hash(link._impl)
    assert cproton_ffi.lib.pn_transport_capacity(transport._impl) > 0
    event = cproton_ffi.lib.pn_collector_peek(collector._impl)
    assert proton.Event.wrap(event).connection == connection


def test_the_installed_version_is_within_the_bounds():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (requirement,) = settings["project"]["optional-dependencies"]["amqp"]
    _, minor, *_ = importlib.metadata.version("python-qpid-proton").split(".")
    assert requirement == f"python-qpid-proton>=0.{minor},<0.{int(minor) + 1}"

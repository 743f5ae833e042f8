"""The parts of uvicorn that `muster.bus.http.asgi_server` overrides or reads.

uvicorn does not document them.  This test shows which have moved before a newer version is pinned.
"""

from __future__ import annotations

import inspect

import pytest

uvicorn = pytest.importorskip("uvicorn", reason="uvicorn is not installed")
h11_impl = pytest.importorskip("uvicorn.protocols.http.h11_impl")

SERVER = {"startup": ["sockets"], "shutdown": ["sockets"], "capture_signals": []}
PROTOCOL = {
    "connection_made": ["transport"],
    "connection_lost": ["exc"],
    "data_received": ["data"],
    "on_response_complete": [],
    "pause_writing": [],
    "resume_writing": [],
}


@pytest.mark.parametrize(
    ("owner", "methods"), [(uvicorn.Server, SERVER), (h11_impl.H11Protocol, PROTOCOL)], ids=str
)
def test_the_methods_have_these_parameters(owner: type, methods: dict[str, list[str]]):
    actual = {name: list(inspect.signature(getattr(owner, name)).parameters)[1:] for name in methods}
    assert actual == methods


def test_a_protocol_has_these_attributes():
    source = inspect.getsource(h11_impl.H11Protocol.__init__)
    assert [name for name in ("cycle", "transport", "loop") if f"self.{name}" not in source] == []
    assert "self.response_complete" in inspect.getsource(h11_impl.RequestResponseCycle.__init__)


def test_the_protocol_of_a_server_can_be_replaced_after_its_configuration_is_loaded():
    async def application(scope: object, receive: object, send: object) -> None: ...

    config = uvicorn.Config(application, http="h11", lifespan="off")
    config.load()
    assert config.http_protocol_class is h11_impl.H11Protocol
    assert config.ssl is None
    assert "config.http_protocol_class" in inspect.getsource(uvicorn.Server.startup)

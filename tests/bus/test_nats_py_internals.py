"""The private names of nats-py that `muster.bus.client` relies on.

pyproject.toml pins nats-py to one minor version.  Before a newer one is admitted, this test shows which of
these names have moved; the contract suite (`tests/bus/test_contract_nats.py`) shows whether they still behave
the same.
"""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import pathlib
import re
import tomllib

import pytest
from nats.aio import client, subscription, transport
from nats.protocol import parser

ROOT = pathlib.Path(__file__).parents[2]

# `muster.bus.client.connection.NatsConnection` overrides or calls these coroutine methods.
METHODS = {
    "_attempt_reconnect": [],
    "_close": ["status", "do_cbs"],
    "_connect_to_server": ["s"],
    "_flush_pending": ["force_flush"],
    "_ping_interval": [],
    "_process_connect_init": [],
    "_process_err": ["err_msg"],
    "_process_info": ["info"],
    "_process_op_err": ["e"],
    "_process_pong": [],
    "_read_loop": [],
    "_send_ping": ["future"],
}
# It reads or replaces these attributes of a client.
ATTRIBUTES = [
    "_closed_cb",
    "_current_server",
    "_disconnected_cb",
    "_error_cb",
    "_flush_queue",
    "_flusher_task",
    "_max_payload",
    "_nuid",
    "_pending",
    "_pending_data_size",
    "_ping_interval_task",
    "_pongs",
    "_ps",
    "_reading_task",
    "_reconnected_cb",
    "_server_info",
    "_server_pool",
    "_subs",
    "_transport",
    "options",
]


@pytest.mark.parametrize("name", METHODS)
def test_a_private_method_of_the_client_has_its_signature(name: str):
    method = getattr(client.Client, name)
    assert inspect.iscoroutinefunction(method)
    assert [*inspect.signature(method).parameters][1:][: len(METHODS[name])] == METHODS[name]


def test_the_private_attributes_exist():
    made = client.Client()
    assert [name for name in ATTRIBUTES if not hasattr(made, name)] == []
    assert client.PING_PROTO == b"PING\r\n"
    assert client.PONG_PROTO == b"PONG\r\n"
    fields = inspect.signature(subscription.Subscription).parameters
    assert {"id", "subject", "queue"} <= set(fields)
    assert {"_io_reader", "_io_writer", "_bare_io_reader", "_bare_io_writer"} <= set(
        vars(transport.TcpTransport())  # type: ignore[no-untyped-call]
    )
    source = inspect.getsource(transport.WebSocketTransport)
    assert [name for name in ("_ws", "_client", "_using_tls") if f"self.{name}:" not in source] == []
    assert inspect.iscoroutinefunction(parser.Parser.parse)
    assert callable(parser.Parser.reset)


def test_the_lists_are_complete():
    """Every private name of a client that the bus uses or overrides is in the lists above."""
    made = client.Client()
    used: set[str] = set()
    for path in (ROOT / "src" / "muster" / "bus" / "client").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                used.add(node.attr)
            elif isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef):
                used.add(node.name)
    private = {name for name in used if re.match(r"_[a-z]", name) and hasattr(made, name)}
    assert private - {*METHODS, *ATTRIBUTES} == set()
    assert {*METHODS, *ATTRIBUTES} - private == {"options"}, "no longer used"


def test_the_installed_version_is_the_pinned_one():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (requirement,) = (text for text in settings["project"]["dependencies"] if text.startswith("nats-py"))
    major, minor, *_ = importlib.metadata.version("nats-py").split(".")
    assert requirement == f"nats-py=={major}.{minor}.*"

"""``muster gateway`` beside a running domain."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from muster.core import errors
from muster.gateways.soap import settings
from tests.cli import driver

IDENTIFY = (
    '<s:Envelope xmlns:s="http://www.w3.org/2003/05/soap-envelope" '
    'xmlns:i="http://schemas.dmtf.org/wbem/wsman/identity/1/wsmanidentity.xsd"><s:Body><i:Identify/></s:Body></s:Envelope>'
)
BEGIN = (
    '<s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/"><s:Body>'
    '<begin xmlns="http://docs.oasis-open.org/ws-caf/2005/10/wsctx"/></s:Body></s:Envelope>'
)


def test_no_client_logs_in_as_a_part_of_the_brokers():
    for role in ("system", "link", "joining"):
        refused = driver.quick("gateway", "password", "ann", "--role", role, stdin="a long secret\n")
        assert refused.code == 2
        assert "--role" in refused.err


@pytest.mark.parametrize("gateway", ["amqp", "wsman"])
def test_a_key_without_a_certificate_is_refused(gateway: str, tmp_path: Path):
    (tmp_path / "key.pem").write_text("")
    refused = driver.quick("gateway", gateway, "--key", tmp_path / "key.pem", home=tmp_path)
    assert (refused.code, "--key needs --cert" in refused.err) == (2, True), refused.err
    with pytest.raises(errors.InvalidInput, match=r"soap\.certificate"):
        settings.SoapSettings(key="key.pem")


@pytest.mark.timeout(180)
def test_gateways_beside_a_domain(tmp_path: Path):
    home = driver.init(tmp_path / "home", settings="[manage]\nenabled = false\n[web]\nenabled = false\n")
    refused = driver.quick("gateway", "wsman", home=home)
    assert refused.code == 5
    assert "is not running" in refused.err
    assert driver.run("up", "--detach", home=home).code == 0
    try:
        set_ = driver.quick("gateway", "password", "ann", home=home, stdin="a long secret\n")
        assert set_.code == 0, set_.err
        clear = driver.quick("gateway", "wsman", "--host", "0.0.0.0", home=home)
        assert clear.code == 3
        assert "unencrypted" in clear.err
        with _serving(home, "wsman") as started:
            headers = {"content-type": "application/soap+xml"}
            response = httpx.post(started["wsman"], content=IDENTIFY, headers=headers)
            assert "ProductVendor" in response.text
            headers = {"content-type": "text/xml"}
            assert httpx.post(started["context"], content=BEGIN, headers=headers).status_code == 401
            begun = httpx.post(
                started["context"], content=BEGIN, headers=headers, auth=("ann", "a long secret"), timeout=30
            )
            assert "begun" in begun.text, begun.text
            assert "soap_refused_total" in _metrics(home)
        if importlib.util.find_spec("proton") is not None:
            _amqp_clients_are_who_they_say(home)
    finally:
        assert driver.run("down", home=home).code == 0


def test_without_the_amqp_engine_set_up_names_the_missing_package_and_the_rest_works(tmp_path: Path):
    script = (
        "import sys; sys.modules['proton'] = None\n"
        "from muster.gateways import udp\n"
        "from muster.message.client import api\n"
        "from muster.message.dispatcher import leadership\n"
        "from muster.cli import main\n"
        "sys.argv = ['muster', 'gateway', 'amqp']\n"
        "main.main()"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, env=driver.environment(tmp_path), capture_output=True, text=True, check=False
    )
    assert done.returncode == errors.MissingDependency.exit_code, done.stderr
    assert "needs python-qpid-proton" in done.stderr
    assert "C compiler" in done.stderr


@contextlib.contextmanager
def _serving(home: Path, *arguments: str) -> Iterator[dict[str, Any]]:
    """A gateway, and the facts that it prints."""
    gateway = subprocess.Popen(
        driver.command_line("gateway", *arguments, "-o", "json"),
        env=driver.environment(home), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert gateway.stdout is not None
        yield json.loads("".join(itertools.takewhile(lambda line: line != "}\n", gateway.stdout)) + "}")
    finally:
        gateway.send_signal(signal.SIGINT)
        gateway.communicate(timeout=30)
    assert gateway.returncode == 0


def _amqp_clients_are_who_they_say(home: Path) -> None:
    """Each is connected to the bus as itself, and may what its role may; who has no name is the guest."""
    import proton

    from tests.gateways.amqp import raw_client

    looks = driver.quick(
        "gateway", "password", "vic", "--role", "viewer", home=home, stdin="another secret\n"
    )
    assert looks.code == 0, looks.err
    with _serving(home, "amqp", "--anonymous", "guest", "--processes", "2") as started:
        assert started["processes"] == 2
        port = int(started["url"].rpartition(":")[2])
        second = driver.quick("gateway", "amqp", "--port", str(port), "--processes", "2", home=home)
        assert second.code == 5
        assert "is in use" in second.err
        for name, login in (
            ("ann", raw_client.plain("ann", "a long secret")),
            ("guest", raw_client.LOGIN),
            ("ann, the operator", raw_client.plain("ann", "a new secret")),
        ):
            if "operator" in name:
                changed = ("gateway", "password", "ann", "--role", "operator")
                driver.quick(*changed, home=home, stdin="a new secret\n")
            raw = raw_client.Raw(port, f"{name}'s", login=login)
            sender = raw.session.sender("out")
            sender.target.address = "queue:orders"
            sender.open()
            raw.until(lambda: sender.credit > 0)  # noqa: B023
            delivery = sender.delivery("1")
            sender.send(proton.Message(body=f"of {name}", durable=True).encode())
            sender.advance()
            raw.until(lambda: delivery.settled)  # noqa: B023
            assert delivery.remote_state == proton.Delivery.ACCEPTED
            raw.socket.close()
        raw = raw_client.Raw(port, "vic's", login=raw_client.plain("vic", "another secret"))
        raw.until(lambda: raw.connection.state & proton.Endpoint.REMOTE_CLOSED)
        assert raw.connection.remote_condition.name == "amqp:unauthorized-access"
        raw.socket.close()
        raw = raw_client.Raw(port, "nobody's", login=raw_client.plain("ann", "wrong"))
        with pytest.raises(
            (AssertionError, ConnectionResetError), match=r"closed the connection|reset by peer"
        ):
            raw.until(lambda: raw.connection.state & proton.Endpoint.REMOTE_ACTIVE)
        raw.socket.close()
    browsed = driver.quick("message", "browse", "queue:orders", "-o", "json", home=home).json()
    assert [row["body"] for row in browsed] == ["of ann", "of guest", "of ann, the operator"]
    known = {
        row["identity"]: row["role"] for row in driver.quick("creds", "list", "-o", "json", home=home).json()
    }
    # That of ann was made for the login alone, so it follows the login's role.
    assert (known["ann"], known["guest"], known["vic"]) == ("operator", "user", "viewer")
    assert not any(name.startswith("ann-") for name in known)


def _metrics(home: Path) -> str:
    """The gateway's own page; its address is in the domain's folder, as for other processes."""
    (started,) = [path.read_text() for path in home.rglob("pages/soap-*")]
    return httpx.get(f"http://{json.loads(started)[0]['targets'][0]}/metrics").text

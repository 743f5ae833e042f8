"""The gateways beside a running domain, and with it."""

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
import psutil
import pytest

from muster.core import errors
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


@pytest.mark.parametrize("gateway", ["amqp", "soap"])
def test_a_key_without_a_certificate_is_refused(gateway: str, tmp_path: Path):
    refused = driver.quick("run", gateway, "--set", f"{gateway}.key=key.pem", home=tmp_path)
    assert refused.code == errors.InvalidInput.exit_code
    assert f"{gateway}.key needs {gateway}.certificate" in refused.err


@pytest.mark.timeout(180)
def test_gateways_beside_a_domain(tmp_path: Path):
    home = driver.init(tmp_path / "home", settings="[manage]\nenabled = false\n[web]\nenabled = false\n")
    set_ = driver.quick("gateway", "password", "ann", home=home, stdin="a long secret\n")
    assert set_.code == 0, set_.err
    clear = driver.quick("run", "soap", "--set", "soap.host=0.0.0.0", home=home)
    assert clear.code == 3
    assert "unencrypted" in clear.err
    assert driver.run("up", "--detach", home=home).code == 0
    try:
        with _serving(home, "soap", "--set", "soap.port=0") as started:
            urls = {row["endpoint"]: row["url"] for row in started["soap"]}
            headers = {"content-type": "application/soap+xml"}
            response = httpx.post(urls["/wsman"], content=IDENTIFY, headers=headers)
            assert "ProductVendor" in response.text
            headers = {"content-type": "text/xml"}
            assert httpx.post(urls["/context"], content=BEGIN, headers=headers).status_code == 401
            begun = httpx.post(
                urls["/context"], content=BEGIN, headers=headers, auth=("ann", "a long secret"), timeout=30
            )
            assert "begun" in begun.text, begun.text
            assert "soap_refused_total" in _metrics(home)
        if importlib.util.find_spec("proton") is not None:
            _amqp_clients_are_who_they_say(home)
            _killed_and_frozen_processes_are_replaced(home)
    finally:
        assert driver.run("down", home=home).code == 0


@pytest.mark.timeout(180)
def test_the_amqp_gateway_of_a_domain(tmp_path: Path):
    """Off by default; supervised if the settings enable it, with its health and its metrics."""
    pytest.importorskip("proton", reason="the AMQP gateway's engine is not installed")
    settings_ = "[manage]\nenabled = false\n[web]\nenabled = false\n[amqp]\nport = 0\nprocesses = 2\n"
    home = driver.init(tmp_path / "home", settings=settings_)
    set_ = driver.quick("gateway", "password", "ann", home=home, stdin="a long secret\n")
    assert set_.code == 0, set_.err
    up = driver.run("up", "--detach", "--with", "amqp", home=home)
    assert up.code == 0, up.err
    try:
        status = driver.quick("status", "-o", "json", home=home).json()
        assert status["amqp"]["processes"] == 2
        port = int(status["amqp"]["url"].rpartition(":")[2])
        _send(port, "ann", ("ann", "a long secret"))
        ready = {}
        for page in driver.wait_until(lambda: _pages(status, home, "amqp-")):
            ready = httpx.get(f"{page}/readyz").json()
            assert ready["ready"], ready
            assert "muster_amqp_connections" in httpx.get(f"{page}/metrics").text
        assert set(ready["parts"]) == {"amqp", "tasks"}
        domain = next(row["url"] for row in status["pages"] if row["process"] == "domain")
        assert "muster_amqp_processes 2.0" in httpx.get(f"{domain}/metrics").text
    finally:
        assert driver.run("down", home=home).code == 0
    browsable = psutil.process_iter(["cmdline"])
    left = [child.pid for child in browsable if "amqp" in (child.info["cmdline"] or ()) and _of(child, home)]
    assert left == []


def _of(process: psutil.Process, home: Path) -> bool:
    try:
        return process.environ().get("MUSTER_HOME") == str(home)
    except psutil.Error:
        return False


def _pages(status: dict[str, Any], home: Path, prefix: str) -> list[str]:
    """Of both processes, when they have published them."""
    rows = driver.quick("status", "-o", "json", home=home).json()["pages"]
    found = [row["url"] for row in rows if row["process"].startswith(prefix)]
    return found if len(found) == 2 else []


def test_without_the_amqp_engine_set_up_names_the_missing_package_and_the_rest_works(tmp_path: Path):
    script = (
        "import sys; sys.modules['proton'] = None\n"
        "from muster.gateways import udp\n"
        "from muster.message.client import api\n"
        "from muster.message.dispatcher import leadership\n"
        "from muster.cli import main\n"
        "sys.argv = ['muster', 'run', 'amqp']\n"
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
        driver.command_line("run", *arguments, "-o", "json"),
        env=driver.environment(home), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert gateway.stdout is not None
        yield json.loads("".join(itertools.takewhile(lambda line: line != "}\n", gateway.stdout)) + "}")
    finally:
        gateway.send_signal(signal.SIGINT)
        gateway.communicate(timeout=30)
    assert gateway.returncode == 0


AMQP = ("amqp", "--set", "amqp.port=0", "--set", "amqp.anonymous=guest", "--set", "amqp.processes=2")


def _send(port: int, name: str, login: tuple[str, str] | None) -> None:
    """One message to the queue ``orders``."""
    import proton

    from tests.gateways.amqp import raw_client

    raw = raw_client.Raw(port, f"{name}'s", login=raw_client.plain(*login) if login else raw_client.LOGIN)
    sender = raw.session.sender("out")
    sender.target.address = "queue:orders"
    sender.open()
    raw.until(lambda: sender.credit > 0)
    delivery = sender.delivery("1")
    sender.send(proton.Message(body=f"of {name}", durable=True).encode())
    sender.advance()
    raw.until(lambda: delivery.settled)
    assert delivery.remote_state == proton.Delivery.ACCEPTED
    raw.socket.close()


def _killed_and_frozen_processes_are_replaced(home: Path) -> None:
    """By the process that the user started; and they end with it, even if it is killed."""
    gateway = subprocess.Popen(
        driver.command_line("run", *AMQP, "-o", "json"),
        env=driver.environment(home), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert gateway.stdout is not None
        facts = "".join(itertools.takewhile(lambda line: line != "}\n", gateway.stdout)) + "}"
        port = int(json.loads(facts)["amqp"]["url"].rpartition(":")[2])

        def workers() -> list[psutil.Process]:
            children = psutil.Process(gateway.pid).children()
            listening = [child for child in children if child.net_connections("tcp")]
            return listening if len(listening) == 2 else []

        for number in (signal.SIGKILL, signal.SIGSTOP):
            hit, other = driver.wait_until(workers, not_yet=(psutil.Error,))
            hit.send_signal(number)
            driver.wait_until(lambda: hit not in workers() and other in workers(), not_yet=(psutil.Error,))  # noqa: B023
        _send(port, "guest", None)
        left = workers()
    finally:
        gateway.kill()
        gateway.communicate()
    psutil.wait_procs(left, timeout=30)
    assert not any(worker.is_running() for worker in left)


def _amqp_clients_are_who_they_say(home: Path) -> None:
    """Each is connected to the bus as itself, and may what its role may; who has no name is the guest."""
    import proton

    from tests.gateways.amqp import raw_client

    looks = driver.quick(
        "gateway", "password", "vic", "--role", "viewer", home=home, stdin="another secret\n"
    )
    assert looks.code == 0, looks.err
    with _serving(home, *AMQP) as started:
        assert started["amqp"]["processes"] == 2
        port = int(started["amqp"]["url"].rpartition(":")[2])
        second = driver.run("run", "amqp", "--set", f"amqp.port={port}", home=home)
        assert second.code == 5
        assert "is in use" in second.err
        _send(port, "ann", ("ann", "a long secret"))
        _send(port, "guest", None)
        changed = ("gateway", "password", "ann", "--role", "operator")
        driver.quick(*changed, home=home, stdin="a new secret\n")
        _send(port, "ann, the operator", ("ann", "a new secret"))
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

"""UDDI in a domain: tokens are issued for the domain's passwords, and roles are checked."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from muster.core.formats import xml
from muster.gateways.soap import envelope
from muster.gateways.uddi.model import schema
from tests.cli import driver

U = schema.UDDI
PASSWORDS = {"ann": "ann's own secret", "bob": "bob's own secret", "vera": "a viewer's secret"}
BUSINESS = (
    '<save_business>{}<businessEntity businessKey=""><name>Printing</name><businessServices>'
    '<businessService serviceKey=""><name>printer seven</name></businessService></businessServices>'
    "</businessEntity></save_business>"
)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A running domain with SOAP endpoints."""
    place = tmp_path / "home"
    assert driver.quick("init", "--port", "0", home=place).code == 0
    settings = place / "muster.toml"
    settings.write_text(
        f"{settings.read_text()}\n[manage]\nenabled = false\n[soap]\nenabled = true\nport = 0\n"
    )
    started = driver.run("up", "--detach", "--timeout", "120", home=place, timeout_s=150)
    assert started.code == 0, started.err
    for name, password in PASSWORDS.items():
        role = "viewer" if name == "vera" else "user"
        result = driver.quick("gateway", "password", name, "--role", role, home=place, stdin=f"{password}\n")
        assert result.code == 0, result.err
    yield place
    assert driver.run("down", home=place, timeout_s=150).code == 0


def say(url: str, body: str) -> xml.XmlElement | None:
    """The element in the body of the answer."""
    request = re.sub(r"<(/?)([A-Za-z])", r"<\1u:\2", body)
    answer = httpx.post(
        url,
        content=f'<s:Envelope xmlns:s="{envelope.SoapVersion.V11.value}" xmlns:u="{U}">'
        f"<s:Body>{request}</s:Body>"
        "</s:Envelope>",
        headers={"content-type": "text/xml"},
        timeout=40,
    )
    return envelope.read(xml.parse(answer.content)).first


def ask(url: str, body: str) -> xml.XmlElement:
    element = say(url, body)
    assert element is not None
    assert element.local != "Fault", element
    return element


def fault(url: str, body: str) -> str | None:
    """The code of the error; None where there is none."""
    element = say(url, body)
    elements = element.walk() if element is not None else ()
    return next((node.get("errCode") for node in elements if node.local == "errInfo"), None)


def token(url: str, name: str) -> str:
    """As it stands in a message."""
    element = ask(url, f'<get_authToken userID="{name}" cred="{PASSWORDS[name]}"/>')
    return f"<authInfo>{element.text_of(U('authInfo'))}</authInfo>"


@pytest.mark.timeout(300)
def test_users_of_a_domain_log_in_and_own_what_they_publish(home: Path):
    status: Any = json.loads(driver.quick("status", "-o", "json", home=home).out)
    url = next(row["url"] for row in status["soap"] if row["endpoint"] == "/uddi")
    assert fault(url, '<get_authToken userID="ann" cred="guessed"/>') == "E_unknownUser"
    assert fault(url, '<get_authToken userID="eve" cred="ann\'s own secret"/>') == "E_unknownUser"

    ann = token(url, "ann")
    saved = ask(url, BUSINESS.format(ann))
    key = next(node.get("businessKey") for node in saved.walk() if node.local == "businessEntity")
    entries = driver.quick("inform", "find", "name = 'printer seven'", "-o", "json", home=home)
    assert [row["writer"] for row in entries.json()] == ["ann"]

    bob, vera = token(url, "bob"), token(url, "vera")
    delete = "<delete_business>{}<businessKey>" + str(key) + "</businessKey></delete_business>"
    assert fault(url, delete.format(bob)) == "E_userMismatch"
    assert fault(url, BUSINESS.format(vera)) == "E_userMismatch", "viewers publish nothing"
    assert fault(url, delete.format("<authInfo>made up</authInfo>")) == "E_authTokenRequired"
    element = ask(url, "<find_business><name>Printing</name></find_business>")
    assert [node.get("businessKey") for node in element.walk() if node.local == "businessInfo"] == [key]

    assert fault(url, f"<discard_authToken>{bob}</discard_authToken>") is None
    assert fault(url, BUSINESS.format(bob)) == "E_authTokenExpired"
    assert fault(url, delete.format(ann)) is None
    assert driver.quick("inform", "find", "name = 'printer seven'", "-o", "json", home=home).json() == []

    changed = driver.quick("gateway", "password", "ann", home=home, stdin="another secret\n")
    assert changed.code == 0
    assert fault(url, BUSINESS.format(ann)) == "E_authTokenExpired", "with the password the token ends"

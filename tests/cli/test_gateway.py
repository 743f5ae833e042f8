"""``muster gateway wsman`` beside a running domain."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.cli import driver

IDENTIFY = (
    '<s:Envelope xmlns:s="http://www.w3.org/2003/05/soap-envelope" '
    'xmlns:i="http://schemas.dmtf.org/wbem/wsman/identity/1/wsmanidentity.xsd"><s:Body><i:Identify/></s:Body></s:Envelope>'
)
BEGIN = (
    '<s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/"><s:Body>'
    '<begin xmlns="http://docs.oasis-open.org/ws-caf/2005/10/wsctx"/></s:Body></s:Envelope>'
)


@pytest.mark.timeout(180)
def test_the_doors_beside_a_domain(tmp_path: Path):
    home = tmp_path / "home"
    assert driver.quick("init", "--port", "0", home=home).code == 0
    settings = home / "muster.toml"
    settings.write_text(settings.read_text() + "\n[manage]\nenabled = false\n")
    refused = driver.quick("gateway", "wsman", home=home)
    assert refused.code == 5
    assert "is not running" in refused.err
    assert driver.run("up", "--detach", home=home).code == 0
    try:
        set_ = driver.quick("gateway", "password", "ann", home=home, stdin="a long secret\n")
        assert set_.code == 0, set_.err
        clear = driver.quick("gateway", "wsman", "--host", "0.0.0.0", home=home)
        assert clear.code == 3
        assert "in the clear" in clear.err
        gateway = subprocess.Popen(
            driver.command_line("gateway", "wsman", "-o", "json"),
            env=driver.environment(home), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        try:
            assert gateway.stdout is not None
            told = json.loads("".join(itertools.takewhile(lambda line: line != "}\n", gateway.stdout)) + "}")
            headers = {"content-type": "application/soap+xml"}
            found = httpx.post(told["wsman"], content=IDENTIFY, headers=headers)
            assert "ProductVendor" in found.text
            headers = {"content-type": "text/xml"}
            assert httpx.post(told["context"], content=BEGIN, headers=headers).status_code == 401
            begun = httpx.post(
                told["context"], content=BEGIN, headers=headers, auth=("ann", "a long secret"), timeout=30
            )
            assert "begun" in begun.text, begun.text
            assert "soap_refused_total" in _metrics(home)
        finally:
            gateway.send_signal(signal.SIGINT)
            gateway.communicate(timeout=30)
        assert gateway.returncode == 0
    finally:
        assert driver.run("down", home=home).code == 0


def _metrics(home: Path) -> str:
    """Of the gateway's own page, which it tells of in the domain's folder as other processes do."""
    (told,) = [path.read_text() for path in home.rglob("pages/soap-*")]
    return httpx.get(f"http://{json.loads(told)[0]['targets'][0]}/metrics").text

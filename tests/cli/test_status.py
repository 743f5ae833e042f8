"""The addresses that `muster status` prints."""

from __future__ import annotations

import socket

import pytest

from muster.app import home
from muster.cli.domain import status
from muster.core.net import interfaces
from muster.core.settings import bus


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "host-a")
    monkeypatch.setattr(interfaces, "addresses", lambda: ["10.0.0.1"])


def running(locator: str | None) -> home.RunningDomain:
    return home.RunningDomain(
        domain="main",
        pid=1,
        started_at_s=0.0,
        version="0",
        servers=("tls://127.0.0.1:4222",),
        locator_url=locator,
    )


def test_a_domain_that_listens_on_all_addresses_has_addresses_for_other_machines():
    urls = status.urls(bus.BusSettings(host="0.0.0.0"), running("https://0.0.0.0:4280"))
    assert urls == {
        "servers": ["tls://127.0.0.1:4222"],
        "servers_for_others": ["tls://host-a:4222", "tls://10.0.0.1:4222"],
        "locator": "https://host-a:4280",
    }


def test_names_of_the_settings_come_first():
    urls = status.urls(bus.BusSettings(names=("muster.example.org",)), running("https://127.0.0.1:4280"))
    assert urls["servers_for_others"] == ["tls://muster.example.org:4222"]
    assert urls["locator"] == "https://muster.example.org:4280"


@pytest.mark.parametrize("locator", [None, "http://127.0.0.1:4280"])
def test_a_domain_on_loopback_has_none(locator: str | None):
    urls = status.urls(bus.BusSettings(), running(locator))
    assert urls == {"servers": ["tls://127.0.0.1:4222"], "servers_for_others": [], "locator": locator}

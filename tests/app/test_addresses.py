"""Names and addresses under which brokers are reached."""

from __future__ import annotations

import socket

import pytest

from muster.app.brokers import addresses
from muster.core.net import interfaces
from muster.core.settings import bus

LOOPBACK = ["localhost", "127.0.0.1", "::1"]


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "host-a")
    monkeypatch.setattr(interfaces, "addresses", lambda: ["10.0.0.1", "2001:db8::1"])


def test_a_certificate_has_the_address_that_the_brokers_listen_on():
    assert addresses.certified(bus.BusSettings()) == ["127.0.0.1", "localhost", "::1"]
    assert addresses.certified(bus.BusSettings(host="bus.example")) == ["bus.example", *LOOPBACK]


def test_brokers_that_listen_everywhere_have_all_addresses_of_the_machine():
    """The name of the machine often resolves to loopback only, so it does not give them."""
    everywhere = addresses.certified(bus.BusSettings(host="0.0.0.0"))
    assert everywhere == ["host-a", "10.0.0.1", "2001:db8::1", *LOOPBACK]


def test_names_of_the_settings_come_first():
    named = bus.BusSettings(host="0.0.0.0", names=("muster.example.org",))
    assert addresses.certified(named)[:2] == ["muster.example.org", "host-a"]


def test_urls_for_other_machines_have_no_address_of_loopback():
    local = ["tls://127.0.0.1:4222"]
    urls = addresses.reachable_urls(bus.BusSettings(host="0.0.0.0"), local)
    assert urls == ("tls://host-a:4222", "tls://10.0.0.1:4222", "tls://[2001:db8::1]:4222")
    forwarded = bus.BusSettings(names=("muster.example.org",))
    assert addresses.reachable_urls(forwarded, local)[0] == "tls://muster.example.org:4222"


@pytest.mark.parametrize("settings", [bus.BusSettings(), bus.BusSettings(servers=("nats://10.0.0.9:4222",))])
def test_urls_of_loopback_and_of_external_brokers_are_unchanged(settings: bus.BusSettings):
    assert addresses.reachable_urls(settings, ["nats://10.0.0.9:4222"]) == ("nats://10.0.0.9:4222",)

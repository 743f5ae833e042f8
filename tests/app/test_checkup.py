"""The doctor finds what is wrong, says what to do, and does not complain of what is well."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from muster.app import catalogue, checkup, domain, home
from muster.core import settings
from tests.cli import driver


@pytest.fixture
def place(tmp_path: Path) -> home.Home:
    made = home.Home(tmp_path / "home")
    assert driver.quick("init", "--port", "0", home=made.root).code == 0
    return made


async def found(place: home.Home, **flags: object) -> dict[str, checkup.Finding]:
    given = {name.replace("__", "."): value for name, value in flags.items()}
    loaded = settings.load(catalogue.Settings, file=place.settings_file, flags=given)
    findings = await checkup.examine(checkup.patient(place, loaded))
    return {one.check: one for one in findings}


async def test_a_healthy_domain(place: home.Home):
    loaded = settings.load(catalogue.Settings, file=place.settings_file)
    async with domain.Domain(loaded):
        seen = await found(place)
        faults = {name: one for name, one in seen.items() if one.state == checkup.FAULT}
        assert faults == {}
        assert seen["domain"].state == checkup.OK
        assert seen["brokers"].found == "1 answer"
        assert seen["keys"].state == checkup.OK
        assert "Java" in seen["java"].found or "not needed" in seen["java"].found
    assert (await found(place))["domain"].advice == "`muster up --detach`"


async def test_a_port_that_is_taken_is_named(place: home.Home):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        seen = await found(place, bus__port=port)
        assert seen["ports"].state == checkup.FAULT
        assert f"127.0.0.1:{port}" in seen["ports"].found
        assert "ss -ltnp" in seen["ports"].advice


async def test_keys_that_others_can_read_are_a_fault(place: home.Home):
    folder = place.root / "local" / "keys"
    folder.chmod(0o755)
    seen = await found(place)
    assert seen["keys"].state == checkup.FAULT
    assert str(folder) in seen["keys"].found
    assert "chmod" in seen["keys"].advice


async def test_brokers_and_a_store_that_do_not_answer(place: home.Home):
    seen = await found(
        place, bus__servers=("nats://127.0.0.1:9",), store__url="postgresql://nobody@127.0.0.1:9/x"
    )
    assert seen["brokers"].state == checkup.FAULT
    assert seen["store"].state == checkup.FAULT
    assert seen["store"].advice or seen["store"].found


async def test_a_program_that_is_missing_is_named(place: home.Home):
    seen = await found(place, bus__binary="/nowhere/nats-server")
    assert seen["broker program"].state == checkup.FAULT
    assert "/nowhere/nats-server" in seen["broker program"].found


def test_the_command_has_a_form_for_programs_and_an_exit_code(place: home.Home):
    answer = driver.quick("doctor", "-o", "json", home=place.root)
    assert answer.code == 0, answer.err
    assert {one["check"] for one in answer.json()} == {
        check.__name__.replace("_", " ").strip() for check in checkup.CHECKS
    }
    (place.root / "local" / "keys").chmod(0o755)
    assert driver.quick("doctor", home=place.root).code == 1


async def test_a_check_that_trips_does_not_hide_the_others(place: home.Home, monkeypatch: pytest.MonkeyPatch):
    async def broken(_: checkup.Patient) -> checkup.Answer:
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(checkup, "CHECKS", (broken, checkup.python))
    seen = await found(place)
    assert seen["broken"].state == checkup.FAULT
    assert seen["python"].state == checkup.OK
    assert asyncio.iscoroutinefunction(checkup.python)

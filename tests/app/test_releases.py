"""Upgrades: what earlier releases wrote is read, what newer ones wrote is accepted or refused clearly."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sqlite3
import tarfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

import muster
from muster.app import domain, home, positions
from muster.app import settings as app_settings
from muster.app.components import bootstrap_client, factories
from muster.app.operations import backup, first_release
from muster.bus import api
from muster.bus.streams import stream as nats_stream
from muster.core import errors, messages
from muster.core.reports import columns
from muster.core.settings import loader
from muster.inform import client as inform_client
from muster.manage import client as manage_client
from muster.message import destinations
from muster.message.client import api as message_api
from muster.notify import client as notify_client
from muster.pipeline.alerts import tracker
from muster.pipeline.fleet import node_columns, state
from muster.pipeline.history import delta, tables
from muster.pipeline.job import checkpoint_label, commit_state
from muster.pipeline.job.driver import driver_terms
from muster.testing.eventually import eventually
from muster.trust.permissions import roles
from tests.cli import driver
from tools import release_fixtures

FIRST = release_fixtures.FOLDER / first_release.VERSION
RELEASES = sorted(path for path in release_fixtures.FOLDER.iterdir() if path.is_dir())
KINDS = release_fixtures.kinds()


def test_every_release_has_fixtures():
    assert muster.__version__ in [folder.name for folder in RELEASES], "run python -m tools.release_fixtures"


@pytest.mark.parametrize("folder", RELEASES, ids=lambda folder: folder.name)
@pytest.mark.may_block(reason="a domain's first start reads files")
async def test_a_domain_of_a_release_is_restored_and_runs(folder: Path, tmp_path: Path):
    place = home.Home(tmp_path / "home")
    manifest, settings = await backup.restore(folder / "backup.tar.gz", place)
    assert manifest.version == folder.name
    data = settings.domain.folder
    checkpoint = settings.pipeline.checkpoint_root(data)
    label = checkpoint_label.open_(checkpoint)
    term = driver_terms.read_last(checkpoint, label.run)  # None: of an older version, set aside
    assert term is None or term.end in ({columns.REPORTS_STREAM: 1}, None)
    history = delta.HistoryTable(settings.pipeline.history_root(data), tables.NODES)
    assert sum(file.rows for file in history.snapshot().files) == len(release_fixtures.MACHINES)
    alerts = commit_state.CommitStateStore(str(data / "pipeline"), 99).load()
    assert alerts.clock_ms == release_fixtures.AT_MS
    async with (
        domain.Domain(settings, components=factories.components(settings)) as running,
        await running.connect("bob", roles.Role.OPERATOR) as bus,
    ):
        contexts = inform_client.InformClient(bus)
        for key, value in release_fixtures.CONTEXTS.items():
            assert (await contexts.get(key, max_staleness_s=0)).value == value
        async with message_api.Connection(bus) as connection, connection.session() as session:
            consumer = await session.consumer(destinations.queue(release_fixtures.QUEUE))
            for body in release_fixtures.BODIES:
                assert await consumer.receive_body(str, timeout_s=30.0) == body
        await check_event(running)
        await check_registry(bus, tmp_path / "password")


async def check_event(running: domain.Domain) -> None:
    async with (
        await running.connect("ann", roles.Role.OPERATOR) as bus,
        notify_client.NotifyClient(bus) as receivers,
    ):
        receiver = await receivers.advertise(
            release_fixtures.RECEIVER,
            release_fixtures.RECEIVER_MODEL.name,
            {"load": 0.5},
            policy=release_fixtures.EVENT_MODEL.name,
            durable=True,
        )
        assert (await receiver.next(timeout_s=30.0)).content == release_fixtures.EVENT


async def check_registry(bus: api.Bus, output: Path) -> None:
    fleet = manage_client.ManageClient(bus)
    assert await fleet.names() == ["shop", "worker"]
    (rollout,) = await fleet.rollouts()
    assert (rollout.state, rollout.operation, rollout.by) == ("done", "stop", "ann")
    assert [step.name for step in await fleet.rollout_steps(rollout.id)] == ["worker"]
    (secret,) = await fleet.secrets()
    assert (secret.name, secret.by, secret.used_by) == (release_fixtures.SECRET, "ann", ["shop"])
    config = (await fleet.describe("shop")).spec.config
    command = ["sh", "-c", f'printf %s "$PASSWORD" > {output}; exec sleep 60']
    await fleet.put("shop", config=config | {"command": command}, desired="up")
    await fleet.wait("shop", "up", timeout_s=60.0)
    await eventually(lambda: output.exists() and output.read_text() == release_fixtures.SECRET_VALUE)
    await fleet.delete("shop")
    await fleet.wait_gone("shop")
    domain_process = bootstrap_client.BootstrapClient(bus)
    name, machine = release_fixtures.ENROLLING
    assert [(row.name, row.machine) for row in await domain_process.waiting()] == [(name, machine)]
    assert (await domain_process.approve(name)).approved == name


def home_of_first_release(folder: Path) -> home.Home:
    place = home.Home(folder / "home")
    with tarfile.open(FIRST / "home.tar.gz") as archive:
        backup._extract(archive, place.root)
    return place


@pytest.mark.may_block(reason="a domain's first start reads files")
async def test_a_home_of_the_first_release_is_converted(tmp_path: Path):
    place = home_of_first_release(tmp_path)
    with place.settings_file.open("a") as file:
        file.write('[store]\nsync = "normal"\npassword = "env:NONE"\n[log]\nlevel = "warning"\n')
    with contextlib.closing(sqlite3.connect(place.root / "lab" / "store.db")) as database, database:
        position = ("responder", b"position", b"41", 99, 99, 0)
        database.execute("INSERT INTO record VALUES (?, ?, ?, ?, ?, ?)", position)
    refused = await asyncio.to_thread(driver.quick, "up", home=place.root)
    assert refused.code == errors.Refused.exit_code
    assert f"`muster convert --home {place.root}`" in refused.err
    converted = await asyncio.to_thread(driver.quick, "convert", "-o", "json", home=place.root)
    assert converted.json()["records"] > 0, converted.err
    assert "[store]" not in place.settings_file.read_text()
    for root, error in ((place.root, errors.Refused), (tmp_path / "none", errors.NotFound)):
        answer = await asyncio.to_thread(driver.quick, "convert", home=root)
        assert answer.code == error.exit_code, answer
    settings = loader.load(app_settings.Settings, file=place.settings_file)
    assert settings.log.level == "warning"
    assert await positions.StoredPosition(settings.domain.folder, "responder").load() == 41
    assert not list(settings.domain.folder.glob("store.db*"))
    async with (
        domain.Domain(settings, components=factories.components(settings)) as running,
        await running.connect("bob", roles.Role.OPERATOR) as bus,
    ):
        await check_event(running)
        await check_registry(bus, tmp_path / "password")


async def test_a_conversion_is_repeated_until_it_is_complete_and_then_not_again(tmp_path: Path, monkeypatch):
    """As on the machines of a domain, of which the first one converts the registry."""
    place = home_of_first_release(tmp_path)

    async def interrupted(*_: object) -> int:
        raise errors.Unavailable("power cut")

    async def never(*_: object) -> int:
        raise AssertionError("converted twice")

    with monkeypatch.context() as patch:
        patch.setattr(first_release, "STEPS", (*first_release.STEPS, interrupted))
        with pytest.raises(errors.Unavailable):
            await backup.convert(place)
    assert place.stored_format().format == home.FORMER_FORMAT
    former = place.settings_file.read_text()
    format_file = (place.root / home.FORMAT_NAME).read_bytes()
    assert await backup.convert(place) > 0
    place.settings_file.write_text(former + '[store]\nurl = "postgresql://muster@10.0.0.1/muster"\n')
    (place.root / home.FORMAT_NAME).write_bytes(format_file)
    monkeypatch.setattr(first_release, "STEPS", (never,))
    assert await backup.convert(place) == 0


async def test_a_registry_on_a_server_is_converted_from_a_backup(tmp_path: Path):
    place = home_of_first_release(tmp_path)
    with place.settings_file.open("a") as file:
        file.write('[store]\nurl = "postgresql://muster@10.0.0.1/muster"\n')
    with pytest.raises(errors.Refused, match="in a database on a server") as raised:
        await backup.convert(place)
    assert "`muster convert --from lab.tar.gz`" in str(raised.value.hint)
    assert await backup.convert(place, source=FIRST / "backup.tar.gz") > 0


@pytest.mark.parametrize("folder", RELEASES, ids=lambda folder: folder.name)
def test_messages_of_a_release_are_read(folder: Path):
    batch, info = columns.decode((folder / "report.arrow").read_bytes())
    assert sorted(batch.column("machine").to_pylist()) == sorted(release_fixtures.MACHINES)
    assert info.channel == "channel-1"
    sent: dict[str, Any] = json.loads((folder / "wire.json").read_bytes())
    assert sent
    for kind, message in sent.items():
        assert kind in KINDS, f"messages of kind {kind} are no longer read"
        assert messages.decode(msgspec.json.encode(message), KINDS[kind])


@pytest.mark.parametrize("folder", RELEASES, ids=lambda folder: folder.name)
def test_the_state_of_a_release_is_read_or_its_checkpoint_is_replaced(folder: Path):
    version, names, packed = msgspec.msgpack.decode((folder / "fleet.msgpack").read_bytes())
    try:
        known = state.FleetState.unpack(
            packed, state.FleetStatePlan(), node_columns.NodeNames.unpack(version, names)
        )
    except state.StateUnreadable:  # then a checkpoint of that release must not be used
        stored = json.loads(msgspec.json.encode(_label_of(folder)))
        assert stored["version"] < checkpoint_label.VERSION
    else:
        assert len(known.nodes) == len(release_fixtures.MACHINES)


def _label_of(folder: Path) -> Any:
    with tarfile.open(folder / "backup.tar.gz") as archive:
        file = archive.extractfile(f"pipeline/checkpoint/{checkpoint_label.LABEL}")
        assert file is not None
        return msgspec.json.decode(file.read())


# Newer releases in a domain: unknown fields are ignored, unknown kinds are refused.


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_message_with_an_unknown_field_is_accepted_and_a_newer_kind_refused(kind: str):
    message = release_fixtures.sample(msgspec.inspect.type_info(KINDS[kind]))
    extended = message | {"added_in_a_later_version": {"a": [1]}}
    assert messages.decode(msgspec.json.encode(extended), KINDS[kind]) == messages.decode(
        msgspec.json.encode(message), KINDS[kind]
    )
    name = kind.partition("/")[0]
    for encode in (msgspec.json.encode, msgspec.msgpack.encode):
        with pytest.raises(
            messages.UnknownMessageKind, match=f"a message of kind {name}/99, but .* reads {kind}"
        ):
            messages.decode(encode(message | {"kind": f"{name}/99"}), KINDS[kind])


async def test_a_stream_of_a_newer_release_is_refused(broker, connect):
    bus = await connect("ann")
    settings = api.StreamSettings("orders", ("topic.orders.>",), max_bytes=1 << 20)
    await bus.stream(settings)
    info = await bus.storage.call("STREAM.INFO.orders")
    assert info["config"]["metadata"][nats_stream.FORMAT_KEY] == "1"
    newer = info["config"]["metadata"] | {nats_stream.FORMAT_KEY: "2"}
    await bus.storage.call("STREAM.UPDATE.orders", info["config"] | {"metadata": newer})
    for opened in (bus.stream(settings), bus.open_stream("orders")):
        with pytest.raises(errors.Refused, match="orders has format 2"):
            await opened


def test_tables_and_alerts_of_a_newer_release_are_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as newer:
        newer.setattr(tables, "VERSION", "2.0")
        delta.HistoryTable(tmp_path, tables.NODES)
    for open_ in (delta.HistoryTable, delta.Snapshot):
        with pytest.raises(delta.SchemaConflict, match=r"schema version 2.0"):
            open_(tmp_path, tables.NODES)
    alerts = commit_state.CommitStateStore(str(tmp_path), 1)
    newer_state = commit_state.CommitState(tracker.AlertTrackerState(), version=99)
    alerts.save(msgspec.json.encode(newer_state))
    with pytest.raises(errors.Conflict, match="version 99"):
        alerts.load()


# Homes.

COMMANDS = [
    ("up",), ("status",), ("down",), ("doctor",), ("config", "print"), ("backup", "x.tar.gz"),
    ("creds", "list"), ("get",), ("alert", "list"), ("machine", "list"),
]  # fmt: skip


@pytest.fixture(scope="module")
def made_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("homes") / "home"
    assert driver.quick("init", "--port", "0", home=root).code == 0
    return root


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_every_command_refuses_a_home_of_a_newer_or_unreleased_version(
    arguments: tuple[str, ...], made_home: Path, tmp_path: Path
):
    root = tmp_path / "home"
    shutil.copytree(made_home, root)
    (root / home.FORMAT_NAME).write_text('{"format":3,"version":"9.1.0"}')
    answer = driver.quick(*arguments, home=root)
    assert answer.code == errors.Refused.exit_code, answer
    assert "was written by Muster 9.1.0 (format 3); this is Muster" in answer.err
    (root / home.FORMAT_NAME).write_text('{"format":1,"version":"0.1.0"}')
    answer = driver.quick(*arguments, home=root)
    assert answer.code == errors.Refused.exit_code, answer
    assert f"`muster convert --home {root}`" in answer.err
    (root / home.FORMAT_NAME).unlink()
    answer = driver.quick(*arguments, home=root)
    assert answer.code == errors.Refused.exit_code, answer
    assert "was created before Muster 0.1.0" in answer.err
    (root / home.FORMAT_NAME).write_text("{")
    assert "cannot be read" in driver.quick(*arguments, home=root).err


def test_a_home_with_settings_only_is_new(tmp_path: Path):
    (tmp_path / home.SETTINGS_NAME).write_text('[domain]\ndata_dir = "."\n')
    assert home.Home(tmp_path).expect().check().format == home.FORMAT
    assert (tmp_path / home.FORMAT_NAME).exists()


def test_a_home_records_the_version_that_used_it_last(made_home: Path):
    assert home.Home(made_home).check() == home.HomeFormat(format=home.FORMAT, version=muster.__version__)

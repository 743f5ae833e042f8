"""A domain is backed up, deleted and restored completely."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import os
import shutil
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from muster.app import certificates, domain, home, positions
from muster.app import settings as app_settings
from muster.app.components import factories, web
from muster.app.operations import backup, doctor
from muster.bus import api, leases
from muster.bus.client import client
from muster.core import errors
from muster.core.settings import loader
from muster.manage.registry import registry_log
from muster.pipeline.job import checkpoint_label, state_copy
from muster.pipeline.job.driver import driver_terms
from muster.testing.eventually import eventually
from muster.trust.permissions import roles
from tests.cli import driver


@pytest.fixture
def place(tmp_path: Path) -> home.Home:
    made = home.Home(tmp_path / "home")
    answer = driver.quick("init", "--port", "0", "--name", "lab", home=made.root)
    assert answer.code == 0, answer.err
    return made


def loaded(place: home.Home) -> app_settings.Settings:
    return loader.load(app_settings.Settings, file=place.settings_file)


@contextlib.asynccontextmanager
async def registry(running: domain.Domain) -> AsyncIterator[registry_log.RegistryLog]:
    async with (
        await running.connect("registry-1", roles.Role.REGISTRY) as bus,
        await registry_log.RegistryLog.open(bus) as log,
    ):
        yield log


async def fill(running: domain.Domain) -> None:
    async with registry(running) as log:
        await log.own(1)
        await log.write([(registry_log.META, registry_log.EPOCH, b"7"), ("manage.secrets", "one", b"1")])
    async with await running.connect("admin", roles.Role.OPERATOR) as bus:
        stream = await bus.stream(api.StreamSettings("orders", ("topic.orders.>",), max_bytes=8 << 20))
        await asyncio.gather(*(stream.publish("topic.orders.eu", b"%d" % n * 1000) for n in range(500)))
        await stream.delete(7)
        billing = {"durable_name": "billing", "deliver_policy": "by_start_sequence", "opt_start_seq": 4}
        question = {"stream_name": "orders", "config": billing | {"ack_policy": "explicit"}}
        assert isinstance(bus, client.NatsBus)
        await bus.storage.call("CONSUMER.CREATE.orders.billing", question)
        bucket = await bus.key_value(api.KeyValueSettings("facts", max_bytes=1 << 20))
        for number in range(5):
            await bucket.put("a.b", b"%d" % number)
        await bucket.put("brief", b"as leases are", ttl_s=1.0)


async def outlive(running: domain.Domain) -> None:
    """A backup is restored long after it was made: what had a time to live is not in it any more then."""
    async with await running.connect("admin", roles.Role.OPERATOR) as bus:
        bucket = await bus.key_value(api.KeyValueSettings("facts"))

        async def is_gone() -> bool:
            return await bucket.get("brief") is None

        await eventually(is_gone)


async def check(running: domain.Domain) -> None:
    async with registry(running) as log:
        record = log.get("manage.secrets", "one")
        assert record is not None
        assert record.value == b"1"
        assert log.fleet.epoch > 7, "later ones than those of the backup may have been assigned"
        assert log.fleet.lost_epochs == [(7, log.fleet.epoch)]
    async with await running.connect("admin", roles.Role.OPERATOR) as bus:
        stream = await bus.open_stream("orders")
        kept = [message async for message in stream.read(1, gaps=True)]
        assert [message.sequence for message in kept] == [n for n in range(1, 501) if n != 7]
        assert kept[-1].data == b"499" * 1000
        assert isinstance(bus, client.NatsBus)
        report = await bus.storage.call("CONSUMER.INFO.orders.billing")
        assert report["num_pending"] == 496, "the consumers of a stream are restored with it"
        bucket = await bus.key_value(api.KeyValueSettings("facts"))
        entry = await bucket.get("a.b")
        assert entry is not None
        assert (entry.value, entry.revision) == (b"4", 5)


async def test_a_restore_that_fails_leaves_no_keys_outside_of_the_home(tmp_path: Path, monkeypatch):
    place, keys, file = home.Home(tmp_path / "home"), tmp_path / "elsewhere" / "keys", tmp_path / "a.tar.gz"
    made = driver.quick("init", "--port", "0", "--set", f"trust.keys_dir={keys}", home=place.root)
    assert made.code == 0, made.err
    await backup.backup(loaded(place), place, file)
    before = {path.relative_to(keys): path.read_bytes() for path in keys.rglob("*") if path.is_file()}
    shutil.rmtree(place.root)
    with pytest.raises(errors.AlreadyExists, match="keys"):  # those of another domain, it might be
        await backup.restore(file, place)
    shutil.rmtree(keys)

    def away(*_: object) -> None:
        raise errors.Unavailable("the broker is away")

    with monkeypatch.context() as patch:
        patch.setattr(backup, "_put_in_place", away)
        with pytest.raises(errors.Unavailable):
            await backup.restore(file, place)
    assert not place.root.exists()
    assert not keys.exists()
    _, restored = await backup.restore(file, place)
    assert {path.relative_to(keys): path.read_bytes() for path in keys.rglob("*") if path.is_file()} == before
    assert not any(path.stat().st_mode & 0o077 for path in (keys, *keys.rglob("*.seed")))
    async with domain.Domain(restored):
        pass


def test_folders_outside_of_the_home_are_removed_if_the_home_cannot_be_moved(tmp_path: Path):
    source, fresh, root = (tmp_path / name for name in ("source", "fresh", "home"))
    for folder in (source, fresh, root):
        folder.mkdir()
    (source / "operator.jwt").write_text("key")
    (root / "used").touch()
    with pytest.raises(OSError, match="not empty"):
        backup._put_in_place({source: tmp_path / "keys"}, fresh, root)
    assert not (tmp_path / "keys").exists()
    assert fresh.exists()


# The pipeline's files

SPARK = Path("drivers", "00000001", "spark")
ALERTS = "alerts-00000001.json"


def write_history(folder: Path) -> None:
    log = folder / "nodes" / "_delta_log"
    log.mkdir(parents=True)
    (log / f"{0:020}.json").write_text('{"txn":{"appId":"r","version":3}}\n')
    (log / f"{1:020}.json").write_text('{"txn":{"appId":"r","version":4}}\n')
    (folder / "nodes" / "day=2030-01-01").mkdir()
    (folder / "nodes" / "day=2030-01-01" / "a.parquet").write_bytes(b"rows")


def write_pipeline(folder: Path) -> None:
    """The checkpoint and alert state of a pipeline that has completed batch 3 of the run r."""
    driver_terms.begin(str(folder / "checkpoint"), driver_terms.DriverTerm(epoch=1, run="r"))
    spark = folder / "checkpoint" / SPARK
    for name in ("offsets", "commits"):
        (spark / name).mkdir(parents=True)
        for number in range(6):
            (spark / name / str(number)).write_text("v1")
    label = checkpoint_label.CheckpointLabel(version=checkpoint_label.VERSION, run="r")
    (folder / "checkpoint" / checkpoint_label.LABEL).write_bytes(msgspec.json.encode(label))
    (folder / ALERTS).write_text('{"batch":["r",3]}')


def names_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


async def test_history_and_checkpoint_are_restored_as_of_one_batch(place: home.Home, tmp_path: Path):
    folder, file = loaded(place).domain.folder, tmp_path / "lab.tar.gz"
    write_history(folder / "history")
    write_pipeline(folder / "pipeline")
    made = await backup.backup(loaded(place), place, file)
    assert made.elsewhere == {}
    shutil.rmtree(place.root)
    other = home.Home(tmp_path / "another")
    _, settings = await backup.restore(file, other)
    restored = settings.domain.folder
    assert names_below(restored / "history") == {
        f"nodes/_delta_log/{0:020}.json",
        "nodes/day=2030-01-01/a.parquet",
    }
    spark = restored / "pipeline" / "checkpoint" / SPARK
    assert names_below(spark) == {f"offsets/{n}" for n in range(4)} | {f"commits/{n}" for n in range(3)}
    assert (restored / "pipeline" / ALERTS).read_text() == '{"batch":["r",3]}'
    assert state_copy.read_restored(restored) is None


@pytest.mark.parametrize("is_kept", [True, False])
async def test_a_history_outside_of_the_home_is_restored_only_where_there_is_none(
    tmp_path: Path, is_kept: bool
):
    place, file, history = (
        home.Home(tmp_path / "home"),
        tmp_path / "lab.tar.gz",
        tmp_path / "data" / "history",
    )
    options = ["--set", f"pipeline.history_dir={history}"]
    assert driver.quick("init", "--port", "0", *options, home=place.root).code == 0
    write_history(history)
    write_pipeline(loaded(place).domain.folder / "pipeline")
    async with domain.Domain(loaded(place)) as running:
        await fill(running)
    await backup.backup(loaded(place), place, file)
    shutil.rmtree(place.root)
    if not is_kept:
        shutil.rmtree(history)
    _, settings = await backup.restore(file, place)
    assert len(names_below(history)) == (3 if is_kept else 2)
    restored = state_copy.read_restored(settings.domain.folder)
    if is_kept:  # it has batches that the restored streams do not have
        assert restored is not None
        assert restored.streams["orders"] == 500
    else:
        assert restored is None


def test_what_is_in_an_object_store_is_named(tmp_path: Path):
    folder, s3 = tmp_path / "home", "pipeline.history_dir=s3://fleet/history"
    assert driver.quick("init", "--port", "0", "--set", s3, home=folder).code == 0
    answer = driver.quick("backup", str(tmp_path / "lab.tar.gz"), home=folder)
    assert answer.code == 0, answer.err
    assert "not included: the history in s3://fleet/history" in answer.out


# Places outside of the home


@pytest.mark.parametrize(
    ("path", "final"),
    [
        ("keys", None),
        ("../keys", None),
        ("../../keys", "/srv/keys"),
        ("/var/keys", "/var/keys"),
    ],
)
def test_paths_outside_of_a_home_are_resolved_from_its_new_place(path: str, final: str | None):
    fresh, place = home.Home(Path("/srv/.restore/home")), home.Home(Path("/srv/lab"))
    actual = backup._outside(fresh.root / "lab" / path, fresh, place)
    assert actual == (Path(final) if final else None)


@pytest.mark.parametrize("runs", [True, False])
async def test_what_was_backed_up_is_there_again(place: home.Home, tmp_path: Path, runs: bool):
    file = tmp_path / "lab.tar.gz"
    authority = certificates.folder(loaded(place))
    async with domain.Domain(loaded(place)) as running:
        await fill(running)
        await asyncio.to_thread(certificates.ensure_authority, loaded(place))
        certificate = (authority / "ca.pem").read_bytes()
        identity = running.trust.broker().operator_jwt
        await (await running.connect("alice", roles.Role.USER)).close()
        made = await backup.backup(loaded(place), place, file) if runs else None
        if runs:
            await outlive(running)
    made = made or await backup.backup(loaded(place), place, file)
    assert {stream.name for stream in made.streams} == {"orders", "registry", "KV_facts"}
    assert file.stat().st_mode & 0o077 == 0

    shutil.rmtree(place.root)
    await backup.restore(file, place)
    async with domain.Domain(loaded(place)) as running:
        await check(running)
        assert running.trust.broker().operator_jwt == identity
        assert running.trust.show("alice").status == "valid"
    assert (authority / "ca.pem").read_bytes() == certificate
    assert [name for name in os.listdir(tmp_path) if name.startswith(".muster")] == []


async def test_positions_and_epochs_are_never_ahead_of_their_streams(
    place: home.Home, tmp_path: Path, monkeypatch
):
    """Components read on, and leases change, while the streams are copied."""
    file, copy = tmp_path / "lab.tar.gz", backup.snapshot_stream
    async with domain.Domain(loaded(place)) as running:
        position = positions.StoredPosition(running.folder.root, "syslog")
        await position.store(5)

        async def read_on(*arguments: Any) -> backup.StreamBackup:
            await position.store(6)
            return await copy(*arguments)

        async with await running.connect("admin", roles.Role.OPERATOR) as bus:
            await bus.stream(api.StreamSettings("zones", ("topic.zones",), max_bytes=1 << 20))
            await bus.key_value(api.KeyValueSettings(leases.BUCKET, max_bytes=1 << 20))
        monkeypatch.setattr(backup, "snapshot_stream", read_on)
        made = await backup.backup(loaded(place), place, file)
        assert await position.load() == 6
    assert [stream.name for stream in made.streams] == ["zones", f"KV_{leases.BUCKET}"]
    other = home.Home(tmp_path / "other")
    _, settings = await backup.restore(file, other)
    assert await positions.StoredPosition(settings.domain.folder, "syslog").load() == 5


RULES = {
    "pipeline.rules": "rules: []\n",
    "responder.rules": "responses: []\n",
    "reactions.rules": "reactions: []\n",
}


async def test_a_restored_home_is_valid_and_accepts_its_tokens(tmp_path: Path):
    """Rule files in the home and outside of it, API tokens, and a certificate that stays where it is."""
    place, file, elsewhere = home.Home(tmp_path / "home"), tmp_path / "lab.tar.gz", tmp_path / "etc"
    elsewhere.mkdir()
    files = dict(
        zip(RULES, (elsewhere / "a.yaml", place.root / "b.yaml", place.root / "c.yaml"), strict=True)
    )
    options = [f"--set={key}={path}" for key, path in files.items()]
    (elsewhere / "ca.pem").write_text("another's")
    options += [f"--set=syslog.ca={elsewhere / 'ca.pem'}", "--set=web.enabled=true", "--set=web.port=0"]
    assert driver.quick("init", "--port", "0", *options, home=place.root).code == 0
    for key, path in files.items():
        path.write_text(RULES[key])
    async with domain.Domain(loaded(place), components=factories.components(loaded(place))) as running:
        entries = {entry.name.partition("-")[0] for entry in running.folder.root.iterdir()}
        assert entries <= set(backup.CONTENTS)
        await asyncio.to_thread(web.set_password, running.trust, password="a long password")
        owner = await asyncio.to_thread(web.token_owner, running.trust, "admin")
        token, _ = await asyncio.to_thread(
            web.open_tokens(running.folder).create, owner, scopes=(), description="", lifetime_s=3600.0
        )
        made = await backup.backup(loaded(place), place, file)
    assert made.elsewhere == {"file of syslog.ca": str(elsewhere / "ca.pem")}

    shutil.rmtree(place.root)
    files["pipeline.rules"].unlink()
    await backup.restore(file, place)
    assert driver.quick("config", "validate", home=place.root).code == 0
    checked = await doctor.run_checks(doctor.doctor_target(place, loaded(place)))
    assert [result for result in checked if result.state == doctor.FAULT] == []
    assert web.open_tokens(home.DomainFolder(loaded(place).domain.folder)).verify(token).owner == "admin"
    async with domain.Domain(loaded(place), components=factories.components(loaded(place))) as running:
        assert {
            part["name"] for part in (await running.status())["components"] if part["state"] == "failed"
        } == set()


async def test_a_damaged_file_or_a_home_in_use_change_nothing(place: home.Home, tmp_path: Path):
    file = tmp_path / "lab.tar.gz"
    await backup.backup(loaded(place), place, file)
    with pytest.raises(errors.AlreadyExists, match="already exists"):
        await backup.backup(loaded(place), place, file)
    with pytest.raises(errors.AlreadyExists, match="not empty"):
        await backup.restore(file, place)
    elsewhere = home.Home(tmp_path / "new")
    with tarfile.open(file) as archive:
        for member in filter(tarfile.TarInfo.isfile, archive.getmembers()):  # Debian's 3.11 has no filters
            path, held = tmp_path / "x" / member.name, archive.extractfile(member)
            assert held is not None
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(held.read())
    (tmp_path / "x" / "muster.toml").write_text("")
    with tarfile.open(tmp_path / "changed.tar.gz", "w:gz") as archive:
        for item in (tmp_path / "x").iterdir():
            archive.add(item, item.name)
    content = file.read_bytes()
    (tmp_path / "cut.tar.gz").write_bytes(content[: len(content) // 2])
    (tmp_path / "text.tar.gz").write_text("not a backup")
    for name in ("changed", "cut", "text"):
        with pytest.raises(errors.InvalidInput, match=r"damaged"):
            await backup.restore(tmp_path / f"{name}.tar.gz", elsewhere)
        assert not elsewhere.root.exists()
    with pytest.raises(errors.NotFound):
        await backup.restore(tmp_path / "none.tar.gz", elsewhere)


def test_a_member_that_climbs_out_is_refused(tmp_path: Path):
    with tarfile.open(tmp_path / "evil.tar.gz", "w:gz") as archive:
        (tmp_path / "file").write_text("x")
        archive.add(tmp_path / "file", "../climbed")
    with pytest.raises(errors.InvalidInput):
        asyncio.run(backup.restore(tmp_path / "evil.tar.gz", home.Home(tmp_path / "deep" / "home")))
    assert not (tmp_path / "climbed").exists()
    assert not (tmp_path / "deep" / "climbed").exists()


def test_a_member_that_is_no_plain_file_is_refused(tmp_path: Path):
    (tmp_path / "out").symlink_to("/etc")
    with tarfile.open(tmp_path / "evil.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "out", "keys")
    with pytest.raises(errors.InvalidInput, match="'keys' is not allowed in a backup"):
        asyncio.run(backup.restore(tmp_path / "evil.tar.gz", home.Home(tmp_path / "home")))


async def test_a_backup_is_verified_by_a_complete_restore(place: home.Home, tmp_path: Path):
    file = tmp_path / "lab.tar.gz"
    async with domain.Domain(loaded(place)) as running:
        await fill(running)
        await backup.backup(loaded(place), place, file)
        manifest = await backup.verify(file)  # the domain runs meanwhile
    assert {stream.name for stream in manifest.streams} >= {"orders", "registry"}
    assert sorted(os.listdir(tmp_path)) == ["home", "lab.tar.gz"]
    unusable = tmp_path / "unusable.tar.gz"
    with tarfile.open(file) as whole, tarfile.open(unusable, "w:gz") as copy:
        for member in whole:
            content = whole.extractfile(member)
            assert content is not None
            data = content.read()
            if member.name == backup.MANIFEST:
                document = msgspec.json.decode(data)
                document["files"]["streams/orders"] = hashlib.sha256(b"x" * 5000).hexdigest()
                data = msgspec.json.encode(document)
            if member.name == "streams/orders":
                data = b"x" * 5000  # all digests agree, but no broker reads it
            member.size = len(data)
            copy.addfile(member, io.BytesIO(data))
    with pytest.raises(errors.MusterError):
        await backup.verify(unusable)


def test_the_newest_backups_of_a_domain_are_kept(place: home.Home, tmp_path: Path):
    names = [f"lab-2026111{day}-023000.tar.gz" for day in range(5)]
    others = ["lab-by-hand.tar.gz", "lab-eu-20261110-023000.tar.gz", "notes.txt"]
    for name in (*names, *others):
        (tmp_path / name).touch()
    removed = backup.remove_older(tmp_path, "lab", 2)
    assert [path.name for path in removed] == names[:3]
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {*names[3:], *others}
    job = msgspec.json.decode(backup.job(loaded(place), place, tmp_path, "30 2 * * *", 7))["resources"][0]
    assert job["schedule"]["cron"] == "30 2 * * *"
    assert job["config"]["command"][1:] == [
        *("--home", str(place.root), "backup", str(tmp_path), "--verify", "--keep", "7")
    ]


def test_a_backup_that_cannot_be_verified_takes_no_place_of_a_good_one(
    place: home.Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def write(_: object, __: object, file: Path, **___: object) -> None:
        await asyncio.to_thread(file.write_text, "no archive")

    monkeypatch.setattr(backup, "backup", write)
    monkeypatch.setattr(backup, "dated", lambda folder, name: folder / f"{name}-20261119-023000.tar.gz")
    (good := tmp_path / "lab-20261118-023000.tar.gz").touch()
    for _ in range(2):
        failed = driver.quick("--home", place.root, "backup", tmp_path, "--verify", "--keep", "1")
        assert failed.code != 0
        assert "is not a backup" in failed.err
    files = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert files == {good.name, "lab-unverified.tar.gz"}

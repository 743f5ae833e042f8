"""Fixtures of a release: what this version writes, for later versions to read.

    python -m tools.release_fixtures        # writes tests/fixtures/VERSION/, once for each release

``backup.tar.gz``   a domain with contexts, queued messages, resources, a secret, a rollout, enrolment tokens,
                    a durable event, a history and a checkpoint, with the throw-away keys of that domain
``home.tar.gz``     the home of that domain
``wire.json``       a message of every kind that has a version
``report.arrow``    reports, as sensors and channels send them
``fleet.msgpack``   the state of the pipeline's shards, and the names of their machines

A folder is written when its version is released, and never changed afterwards. `tests/app/test_releases.py`
reads all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import re
import shutil
import sys
import tarfile
import tempfile
from typing import Any

import msgspec

import muster
from muster import connection
from muster.app import domain, enrolment, home, identities
from muster.app import settings as app_settings
from muster.app.components import bootstrap_client, factories
from muster.app.operations import backup
from muster.bus import api
from muster.core import errors, messages
from muster.core.reports import columns
from muster.core.settings import loader
from muster.inform import client as inform_client
from muster.manage import client as manage_client
from muster.manage import rows
from muster.message import destinations
from muster.message.client import api as message_api
from muster.notify import client as notify_client
from muster.notify import models
from muster.pipeline.alerts import tracker
from muster.pipeline.fleet import blocks, state
from muster.pipeline.history import data_files, delta, tables
from muster.pipeline.job import batch_commit, checkpoint_label, commit_state
from muster.pipeline.job.driver import driver_terms
from muster.predicates import types
from muster.testing.eventually import eventually
from muster.trust import credentials, nkeys
from muster.trust.permissions import roles
from tools.reference import wire

FOLDER = pathlib.Path(__file__).parents[1] / "tests" / "fixtures"
AT_MS = 1_790_000_000_000
MACHINES = ("web-1", "web-2", "db-1")
SETTINGS = """
[domain]
name = "lab"
data_dir = "."
[bus]
port = 0
[web]
enabled = false
"""
MANIFEST = """
resources:
  - {name: worker, type: process, agent: local, desired: down, config: {command: [sleep, "60"]}}
  - name: shop
    type: process
    agent: local
    desired: down
    config: {command: [sleep, "60"], environment: {PASSWORD: {secret: "store:shop-password"}}}
"""
SECRET, SECRET_VALUE = "shop-password", "s3cret"
ENROLLING = ("host-b", "machine-1")  # a name, and the machine that waits for approval
RECEIVER = "web"
RECEIVER_MODEL = models.Model("WebServer", {"load": types.FLOAT})
EVENT_MODEL = models.Model("alert", {"threat_level": types.INT}, models.ModelKind.EVENT)
EVENT = {"threat_level": 7}
YEARS_S = 10 * 365 * 86400.0
QUEUE = "orders"
BODIES = ("first", "second", "third")
CONTEXTS = {"lab/a": b"1", "lab/b": b"two", "lab/c": bytes(range(256))}


def report(machine: str, sequence: int) -> messages.NodeReport:
    return messages.NodeReport(
        machine=machine,
        group=machine.partition("-")[0],
        sequence=sequence,
        at_ms=AT_MS + 1000 * sequence,
        period_s=10.0,
        metrics={"cpu_percent": 12.5, "shop.orders": 3.0},
    )


def reports() -> bytes:
    rows = [report(machine, 1) for machine in MACHINES]
    return columns.encode(columns.to_batch(rows), columns.BatchInfo(channel="channel-1", sequence=1))


def pieces(data: bytes) -> list[blocks.ReportPiece]:
    batch, info = columns.decode(data)
    return [blocks.ReportPiece.from_message(1, AT_MS, batch, info)]


def fleet() -> bytes:
    fleet_state = state.FleetState(state.FleetStatePlan())
    fleet_state.feed(pieces(reports()), AT_MS)
    names = fleet_state.nodes.names
    return msgspec.msgpack.encode((names.version, names.pack(), fleet_state.pack()))


def kinds() -> dict[str, type[messages.WireMessage]]:
    """The messages whose kind has a version, by kind."""
    modules = [module for group in wire.PARTS.values() for module in group]
    structs = [struct for module in (*wire.SHARED, *modules) for struct in wire.structs_of(module)]
    return {
        str(struct.__struct_config__.tag): struct
        for struct in structs
        if issubclass(struct, messages.WireMessage) and "/" in str(struct.__struct_config__.tag)
    }


def sample(kind: msgspec.inspect.Type) -> Any:
    """A value of a type, in JSON."""
    match kind:
        case msgspec.inspect.Metadata(type=inner):
            return sample(inner)
        case msgspec.inspect.StructType(fields=fields, tag=tag, tag_field=tag_field, array_like=array_like):
            values = {field.encode_name: sample(field.type) for field in fields}
            if array_like:
                return [*([tag] if tag is not None else []), *values.values()]
            return ({tag_field: tag} if tag_field else {}) | values
        case msgspec.inspect.StrType(pattern=str(pattern)) if match := re.match(r"\^\(([^|)]+)", pattern):
            return match[1]
        case msgspec.inspect.UnionType(types=types):
            return sample(
                next(member for member in types if not isinstance(member, msgspec.inspect.NoneType))
            )
        case msgspec.inspect.EnumType(cls=cls):
            return next(iter(cls)).value
        case msgspec.inspect.LiteralType(values=values):
            return values[0]
        case msgspec.inspect.ListType(item_type=item) | msgspec.inspect.VarTupleType(item_type=item):
            return [sample(item)]
        case msgspec.inspect.SetType(item_type=item) | msgspec.inspect.FrozenSetType(item_type=item):
            return [sample(item)]
        case msgspec.inspect.TupleType(item_types=items):
            return [sample(item) for item in items]
        case msgspec.inspect.DictType(key_type=key, value_type=value):
            return {str(sample(key)): sample(value)}
        case msgspec.inspect.BoolType():
            return True
        case msgspec.inspect.IntType(ge=least) | msgspec.inspect.FloatType(ge=least):
            return max(1, least or 0)
        case msgspec.inspect.BytesType():
            return "YQ=="
        case _:
            return "a"


def wire_messages() -> dict[str, Any]:
    return {tag: sample(msgspec.inspect.type_info(struct)) for tag, struct in sorted(kinds().items())}


def write_pipeline(settings: app_settings.Settings) -> None:
    """A history with one batch, and a checkpoint that has read it."""
    folder = settings.domain.folder
    checkpoint = settings.pipeline.checkpoint_root(folder)
    label = checkpoint_label.open_(checkpoint)
    root = settings.pipeline.history_root(folder)
    rows = data_files.write(root, tables.NODES, _history_rows(), f"{label.run}-0")
    positions = {batch_commit.POSITIONS[columns.REPORTS_STREAM]: 1}
    delta.HistoryTable(root, tables.NODES).commit(rows.files, (label.run, 0), positions)
    driver_terms.begin(checkpoint, driver_terms.DriverTerm(epoch=1, run=label.run))
    spark = pathlib.Path(driver_terms.folder_of(checkpoint, 1)) / driver_terms.SPARK
    for name, content in (("offsets", f'v1\n{{}}\n{{"{columns.REPORTS_STREAM}":1}}'), ("commits", "v1\n{}")):
        (spark / name).mkdir(parents=True)
        (spark / name / "0").write_text(content)
    alerts = commit_state.CommitState(tracker.AlertTrackerState(), batch=(label.run, 0), clock_ms=AT_MS)
    commit_state.CommitStateStore(str(folder / "pipeline"), 1).save(msgspec.json.encode(alerts))


def _history_rows() -> Any:
    import pyarrow as pa

    return pa.Table.from_batches([piece.rows() for piece in pieces(reports())])


async def make_backup(file: pathlib.Path) -> None:
    with tempfile.TemporaryDirectory(prefix="muster-release-") as folder:
        place = home.Home(pathlib.Path(folder) / "home")
        place.root.mkdir()
        place.settings_file.write_text(
            '[domain]\nname = "lab"\ndata_dir = "."\n[bus]\nport = 0\n[web]\nenabled = false\n'
        )
        place.stamp()
        settings = loader.load(app_settings.Settings, file=place.settings_file)
        identities.open_or_create(settings)
        write_pipeline(settings)
        async with (
            domain.Domain(settings, components=factories.components(settings)) as running,
            await running.connect("ann", roles.Role.OPERATOR) as bus,
        ):
            contexts = inform_client.InformClient(bus)
            for key, value in CONTEXTS.items():
                await contexts.put(key, value)
            async with message_api.Connection(bus) as connection, connection.session() as session:
                producer = session.producer(destinations.queue(QUEUE))
                for body in BODIES:
                    await producer.send(body)
            await fill_registry(bus)
            await leave_event(bus)
        await backup.backup(settings, place, file)
        with tarfile.open(file.with_name("home.tar.gz"), "w:gz") as archive:
            for path in sorted(place.root.rglob("*")):
                name = path.relative_to(place.root)
                if path.is_file() and name.parts[1:2] not in (("run",), ("logs",)):
                    archive.add(path, str(name), recursive=False)


async def fill_registry(bus: api.Bus) -> None:
    fleet = manage_client.ManageClient(bus)
    await fleet.set_secret(SECRET, SECRET_VALUE)
    await fleet.apply(MANIFEST, wait_s=30.0)
    rollout = await fleet.rollout(rows.RolloutPlan(operation="stop", timeout_s=5), "worker")

    async def ended() -> bool:
        return (await fleet.rollouts(rollout.id))[0].state == "done"

    await eventually(ended)
    domain_process = bootstrap_client.BootstrapClient(bus)
    await domain_process.token("host-c", lifetime_s=YEARS_S)
    name, machine = ENROLLING
    issued = await domain_process.token(name, approval=True, lifetime_s=YEARS_S)
    token = enrolment.EnrolmentToken.parse(issued.token)
    joining = await connection.connect(token.servers, creds=credentials.Credentials.parse(token.creds))
    async with joining:
        key = nkeys.KeyPair.create(nkeys.KeyKind.USER).public
        with contextlib.suppress(errors.Unavailable):  # it waits for approval
            await bootstrap_client.BootstrapClient(joining).enrol(key, machine=machine)


async def leave_event(bus: api.Bus) -> None:
    """A durable event for a receiver that is not there."""
    async with notify_client.NotifyClient(bus) as receivers:
        await receivers.define(RECEIVER_MODEL)
        await receivers.define(EVENT_MODEL)
        await receivers.advertise(
            RECEIVER, RECEIVER_MODEL.name, {"load": 0.5}, policy=EVENT_MODEL.name, durable=True
        )
    async with notify_client.NotifyClient(bus) as receivers:
        await receivers.sender("watch").send(EVENT_MODEL.name, EVENT, durable=True)


def main() -> int:
    folder = FOLDER / muster.__version__
    if folder.exists():
        sys.stderr.write(f"{folder} exists: the fixtures of a release are not changed\n")
        return 1
    folder.mkdir(parents=True)
    try:
        (folder / "wire.json").write_bytes(msgspec.json.format(msgspec.json.encode(wire_messages())) + b"\n")
        (folder / "report.arrow").write_bytes(reports())
        (folder / "fleet.msgpack").write_bytes(fleet())
        asyncio.run(make_backup(folder / "backup.tar.gz"))
    except BaseException:
        shutil.rmtree(folder)
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The parsers under test: what each is called with, and seeds that show its format.

A target is a function of bytes. It may raise `errors.MusterError`; any other exception is a defect, and so is
a target that returns but gives a result that it cannot read back.
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import msgspec
import pyarrow as pa

from muster.app import settings as app_settings
from muster.bus import api as bus_api
from muster.bus import message_format
from muster.bus.client import broker_errors, counters
from muster.bus.client import parser as client_parser
from muster.bus.http import server as http_server
from muster.core import errors, messages, topics, units
from muster.core.formats import xml
from muster.core.net import http1
from muster.core.reports import columns, packed
from muster.core.settings import loader
from muster.gateways.soap import addresses, envelope, xsd_types
from muster.gateways.uddi.model import schema as uddi_schema
from muster.inform import protocol as inform_protocol
from muster.loop import reaction_rules, response_rules
from muster.manage import manifest
from muster.manage.adapters import plugins
from muster.message import destinations, selectors
from muster.message import messages as jms_messages
from muster.message import protocol as message_protocol
from muster.message.amqp_format import message_codec
from muster.message.dispatcher.log import pages
from muster.monitor import report_xml
from muster.monitor.channel import aggregator, packed_rows
from muster.notify import documents, documents_xml, models
from muster.pipeline.alerts import notifications, rules
from muster.pipeline.fleet import node_columns, state
from muster.pipeline.job.driver import driver_terms
from muster.predicates import types
from muster.predicates.syntax import parser, printer
from muster.trust import credentials, grants, jwt, nkeys
from muster.trust import documents as trust_documents
from tools import release_fixtures

Target = Callable[[bytes], object]


@dataclass(frozen=True)
class FuzzTarget:
    call: Target
    seeds: tuple[bytes, ...]


TARGETS: dict[str, FuzzTarget] = {}


def target(*seeds: str | bytes) -> Callable[[Target], Target]:
    def register(call: Target) -> Target:
        encoded = tuple(seed.encode() if isinstance(seed, str) else seed for seed in seeds)
        TARGETS[call.__name__] = FuzzTarget(call, encoded)
        return call

    return register


def attempt(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """The result; None after a documented error, so that a target can go on."""
    with contextlib.suppress(errors.MusterError):
        return call(*arguments, **options)
    return None


def text_of(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _release_file(suffix: str) -> str:
    """The first file of the backup of the release whose name ends like this."""
    with tarfile.open(release_fixtures.FOLDER / "0.1.0" / "backup.tar.gz") as archive:
        name = next(name for name in archive.getnames() if name.endswith(suffix))
        file = archive.extractfile(name)
        assert file is not None
        return file.read().decode()


def _grant() -> str:
    authority = grants.Authority(nkeys.KeyPair.create(nkeys.KeyKind.ACCOUNT))
    return authority.grant("ann", {"_role": "boss"}, tier=1, now=0.0, lifetime_s=1e9)[0]


@target("a/b/c", "a/*/#", "a//b", "kind=order&city=Bonn", "a%2Fb", "topic/\u00e4\\/x")
def topic(data: bytes) -> None:
    text = text_of(data)
    parsed = attempt(topics.Topic.parse, text)
    pattern = attempt(topics.TopicPattern.parse, text)
    if parsed is not None:
        assert topics.Topic.parse(str(parsed)) == parsed
        assert topics.Topic.from_subject(parsed.subject) == parsed
    if parsed is not None and pattern is not None:
        pattern.matches(parsed)


@target("queue:orders", "topic:a/b", "a", "queue:%")
def destination(data: bytes) -> None:
    destinations.Destination.parse(text_of(data))


@target("topic.a.b", "muster.manage.from.x.read.list", "a.*.>", "topic.%20")
def subject(data: bytes) -> None:
    attempt(message_format.check_subject, text_of(data), wildcards=True)
    destinations.from_subject(text_of(data))


@target(
    "cpu > 90 AND host LIKE 'web-%'",
    "a IN ('x', 'y') OR NOT (b BETWEEN 1 AND 2.5e3)",
    "sender: (_tier >= 2) AND x IS NOT NULL",
    "a + 1 * -b / 2 <> 0x1F",
    "name LIKE 'a!_%' ESCAPE '!'",
)
def predicate(data: bytes) -> None:
    parsed = parser.parse(text_of(data))
    assert parser.parse(printer.write(parsed)) == parsed


@target("JMSPriority > 3 AND color = 'red'", "JMSXGroupID IS NULL", "a = 'it''s'")
def selector(data: bytes) -> None:
    selectors.parse(text_of(data))


@target("command AND sender: (_role = 'boss')", "TRUE")
def policy(data: bytes) -> None:
    models.parse_policy(text_of(data))


@target("string", "list of int", "one of 'a', 'b'", "float", "set of string")
def attribute_type(data: bytes) -> None:
    types.parse_type(text_of(data))


@functools.cache
def _checks() -> Any:
    return plugins.config_validators()


@target(
    "resources:\n  - {name: a, type: process, agent: local, config: {command: [sleep, '1']}}\n",
    "resources: [{name: a, type: http, where: \"zone = 'x'\", depends_on: [b], config: {health_url: 'http://x/'}}]",
    "topologies:\n  - {name: mesh, shape: ring, size: 3, agent: local}\n",
    "a: &x [1]\nb: *x\n",
)
def manifest_file(data: bytes) -> None:
    manifest.read(text_of(data), _checks())


@target(
    "rules:\n  - {name: hot, scope: node, when: cpu_percent > 95, for: 30s}\n",
    "contacts: {a: {mail: [a@b.c]}}",
)
def rule_file(data: bytes) -> None:
    attempt(rules.parse, text_of(data))
    notifications.parse_contacts(text_of(data), "contacts")


@target('responses:\n  - {alert: hot, event: command, to: "host = {name}", content: {operation: restart}}\n')
def response_file(data: bytes) -> None:
    response_rules.load(text_of(data))


@target('reactions:\n  - {where: "group = \'shop\'", model: Server, policy: "TRUE", operations: [restart]}\n')
def reaction_file(data: bytes) -> None:
    reaction_rules.load(text_of(data))


@functools.cache
def _scratch() -> pathlib.Path:
    memory = pathlib.Path("/dev/shm")  # a file on a disk takes longer to open than to read
    parent = memory if memory.is_dir() else None
    return pathlib.Path(tempfile.mkdtemp(prefix="muster-fuzz-", dir=parent)) / "muster.toml"


@target(
    '[domain]\nname = "lab"\ndata_dir = "."\n[bus]\nport = 4222\nbrokers = 3\n',
    '[pipeline]\nhistory_dir = "s3://a/b"\ntrigger_s = "5s"\n[[inform.rules]]\nkeys = "a/*"\n',
    '[retention.registry]\nmax_bytes = "1GiB"\n',
)
def settings_file(data: bytes) -> None:
    _scratch().write_bytes(data)
    loader.load(app_settings.Settings, file=_scratch())


@target("5s", "1.5h", "10m", "1d")
def duration(data: bytes) -> None:
    attempt(units.parse_duration_s, text_of(data))
    units.parse_size_bytes(text_of(data))


@target(release_fixtures.reports())
def report_arrow(data: bytes) -> None:
    """Also what channels do with a batch: Arrow reads memory by offsets that a sender chose."""
    batch, info = columns.decode(data)
    columns.encode(batch, info)
    pieces = list(aggregator._pieces(batch, 64))
    pa.Table.from_batches([batch, *pieces], schema=batch.schema).combine_chunks()
    batch.take(pa.array(range(batch.num_rows))[::-1])
    if info.schema == columns.NODE_SCHEMA:
        columns.from_batch(batch)


@target(
    report_xml.encode(release_fixtures.report("web-1", 1)),
    b'<r:node-report xmlns:r="urn:x" machine="a"/>',
)
def report_as_xml(data: bytes) -> None:
    report_xml.encode(report_xml.decode(data))


@target(
    messages.encode(release_fixtures.report("web-1", 1)),
    messages.encode(release_fixtures.report("a", 2), "msgpack"),
)
def report_message(data: bytes) -> None:
    messages.decode(data, messages.NodeReport)


@functools.cache
def _packed() -> list[bytes]:
    return [packed.encode(release_fixtures.report(name, 1)) for name in "bcb"]


@target(
    packed.encode(release_fixtures.report("web-1", 1)),
    packed.encode(release_fixtures.report("a", 2)),
)
def packed_report(data: bytes) -> None:
    others = _packed()
    rows, left = packed_rows.PackedReader().read([others[0], data, *others[1:]])
    assert rows is not None
    rows.batch.validate(full=True)
    reports = dict(zip(rows.places, columns.from_batch(rows.batch), strict=True))
    assert sorted([*reports, *left]) == [0, 1, 2, 3]
    assert [reports[place] for place in (0, 2, 3)] == list(map(packed.decode, others))
    if 1 in reports:
        assert reports[1] == packed.decode(data)
        rows.are_named([b"b", b"", b"\xff" * 300, b"b.c"])
    packed.decode(data)


AMQP = bytes.fromhex(
    "005370c0020141"  # header
    "005373c00401a1016d"  # properties
    "005374c10702a1016ba10176"  # application properties
    "005377a10568656c6c6f"  # a value
)


@target(AMQP, bytes.fromhex("005375a00568656c6c6f"), bytes.fromhex("005377c10602a10161540a"))
def amqp_message(data: bytes) -> None:
    attempt(message_codec.decode, data, None, 1)
    message_codec.decode(data, destinations.queue("a"), 1)


@target(b'{"t":"t","id":"x","at":7,"to":"queue:a","pri":4}', b"{}")
def jms_meta(data: bytes) -> None:
    jms_messages.decode_meta(data)


@target(msgspec.msgpack.encode({"request": "hello", "connection": "a-b"}))
def dispatcher_request(data: bytes) -> None:
    message_protocol.decode_request(data)


_PAGED = [pages.PagedMessage("{}", b"x")]


@target(
    pages.encode(pages.MessagePage(None, _PAGED)),
    pages.encode(pages.MessagePage()),
    pages.encode(pages.MessagePage(None, _PAGED, [("subject", 1)], [1])),
)
def log_page(data: bytes) -> None:
    page = bus_api.StoredMessage("subject", data, {}, 1, 0)
    attempt(lambda: list(pages.read(page)))
    pages.cover(page)


@target(
    msgspec.msgpack.encode(["key", b"value"]), inform_protocol.encode(inform_protocol.PutContext("k", b"v"))
)
def context_record(data: bytes) -> None:
    attempt(inform_protocol.decode, data, inform_protocol.ContextLogPage)
    inform_protocol.decode(data, inform_protocol.PutContext)


@target(
    b'<s:Envelope xmlns:s="http://www.w3.org/2003/05/soap-envelope" xmlns:a="http://www.w3.org/2005/08/addressing">'
    b"<s:Header><a:Action>x</a:Action><a:To>y</a:To></s:Header><s:Body><find_business/></s:Body></s:Envelope>",
    b'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY b "c">]><a>&b;</a>',
    b'<a xmlns="urn:x" b="c">d<e/>&amp;<![CDATA[f]]></a>',
)
def soap_message(data: bytes) -> None:
    root = xml.parse(data)
    assert xml.parse(xml.write(root)) == root
    attempt(uddi_schema.validate, root)
    message = envelope.read(root)
    addresses.read(message)


@target("PT5M30S", "2026-11-17T08:00:00Z", "P1Y2M", "-PT1S", "1", "true")
def xsd_value(data: bytes) -> None:
    text = text_of(data)
    for parse in (
        xsd_types.parse_duration_s,
        xsd_types.parse_datetime,
        xsd_types.parse_boolean,
        xsd_types.parse_integer,
        functools.partial(xsd_types.parse_until_s, now_s=0.0),
    ):
        attempt(parse, text)


@target(
    b"GET /a?b=c HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"PUT / HTTP/1.0\r\nContent-Length: 5\r\n\r\n",
)
def http_head(data: bytes) -> None:
    http_server.parse_request(data, "peer")
    with contextlib.suppress(http1.MalformedHttp):
        http1.read_head(data)


@target(b"NATS/1.0\r\na: b\r\n\r\n", b"NATS/1.0 503 No Responders\r\n\r\n")
def bus_headers(data: bytes) -> None:
    message_format.decode_headers(data)


@target(
    b'INFO {"connect_urls": ["a:1"]}\r\n+OK\r\nMSG a.b 1 2\r\nhi\r\nPING\r\n-ERR \'x\'\r\nPONG\r\n',
    b"HMSG a.b 2 _R.a.b 12 14\r\nNATS/1.0\r\n\r\nhi\r\nMSG a.c 2  0\r\n\r\n",
    b"HMSG a 1 12 12\r\nNATS/1.0\r\n\r\n\r\n",
)
def broker_lines(data: bytes) -> None:
    """Whatever arrives, in two blocks, each subscription sees its own subjects only."""
    read: list[bytes] = []
    table = client_parser.WireSubscriptions(counters.ConnectionCounters(None))
    for number, pattern in enumerate((b"a.b", b"a.>"), 1):
        table.by_number[b"%d" % number] = client_parser.WireSubscription(
            number, pattern.decode(), "", lambda subject, *_: read.append(subject)
        )
    parser_ = client_parser.BrokerParser(mock.MagicMock(), table)
    parser_.reads_messages = True
    with contextlib.suppress(broker_errors.BrokerError):
        for block in (data[: len(data) // 2], data[len(data) // 2 :]):
            parser_.feed(block)
    assert all(message_format.is_subject(subject.decode()) and subject.startswith(b"a.") for subject in read)


@target("models:\n  - {name: machine, attributes: {number: int}}\n", b'{"model": {"name": "a"}}')
def notify_document(data: bytes) -> None:
    documents.read(data)


@target("<state xmlns='urn:muster:notify' model='a'/>", "<model name='a'/>")
def notify_xml(data: bytes) -> None:
    documents_xml.read(text_of(data))


@target(_release_file("users/admin.jwt"), "a.b.c")
def token(data: bytes) -> None:
    jwt.read(text_of(data))


@target(_release_file("users/admin.creds"))
def credentials_file(data: bytes) -> None:
    credentials.Credentials.parse(text_of(data))


@target(_grant(), "a.b.c")
def sealed_grant(data: bytes) -> None:
    text = text_of(data)
    trust_documents.is_serial(trust_documents.serial_of(text))
    with contextlib.suppress(trust_documents.DocumentRefused):
        trust_documents.open_sealed(text, trust_documents.Grant)
    grants.Revocations().accept(text, known=())


@target(b'v1\n{"a":1}\n{"reports":7}')
def checkpoint_offsets(data: bytes) -> None:
    driver_terms.parse_offsets(data)


@functools.cache
def _fleet_names() -> tuple[str, bytes]:
    version, names, _ = msgspec.msgpack.decode(release_fixtures.fleet())
    return version, names


@target(msgspec.msgpack.decode(release_fixtures.fleet())[2])
def fleet_state(data: bytes) -> None:
    version, names = _fleet_names()
    state.FleetState.unpack(data, state.FleetStatePlan(), node_columns.NodeNames.unpack(version, names))


def run(name: str, data: bytes) -> None:
    """Call a target; a documented error is fine."""
    with contextlib.suppress(errors.MusterError):
        TARGETS[name].call(data)

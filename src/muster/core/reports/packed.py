"""The form in which a sensor sends a node report: fixed fields and numbers as they lie in memory.

A report has a few dozen metrics, and nearly all machines report the same few sets of names each time.  The
names are one compressed block, which a reader recognises without reading it, and the values are an array.  So
a channel reads thousands of reports with a few operations on arrays (`monitor.channel.packed_rows`), and a
report takes half the bytes of JSON.

    4 bytes   `MAGIC`, which begins neither JSON nor MessagePack
    6 × u16   bytes of machine, group and zone; number of metrics; bytes of names and services
    3 × i64   boot, sequence, at_ms
    f64       period_s
    i64       dropped
    f64       the value of each metric
    text      machine, group, zone: UTF-8
    names     a JSON list in the format of zlib; empty without metrics
    services  a JSON list; empty without services
    zeros     to a multiple of 8 bytes

All numbers are little-endian.  A reader refuses what it does not know; another layout gets another `MAGIC`.
"""

from __future__ import annotations

import functools
import itertools
import struct
import zlib
from typing import Annotated, Any

import msgspec

from muster.core import messages

MAGIC = b"\xc1nr2"  # MessagePack never uses 0xc1
HEADER = struct.Struct("<4s6Hqqqdq")
NAMES_BYTES_MAX = 64 << 10  # before compression
BYTES_MAX = 64 << 10  # a dozen metrics and a dozen services are 2 kB

Services = Annotated[tuple[messages.ServiceReport, ...], msgspec.Meta(min_length=1, max_length=256)]
Names = Annotated[tuple[messages.Name, ...], msgspec.Meta(max_length=1024)]

_services = msgspec.json.Decoder(Services)
_names = msgspec.json.Decoder(Names)
_INVALID = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def encode(report: messages.NodeReport) -> bytes:
    """`MessageTooLarge` or `MalformedMessage` if it does not fit into this form."""
    metrics = report.metrics
    try:
        return pack(
            (report.boot, report.sequence, report.at_ms, report.period_s, report.dropped),
            (report.machine.encode(), report.group.encode(), report.zone.encode()),
            pack_names(tuple(metrics)),
            struct.pack(f"<{len(metrics)}d", *metrics.values()),
            msgspec.json.encode(report.services) if report.services else b"",
        )
    except (UnicodeEncodeError, struct.error, OverflowError) as error:
        raise messages.MalformedMessage(f"a report with a value that has no such form: {error}") from error


def pack(
    numbers: tuple[int, int, int, float, int],
    texts: tuple[bytes, bytes, bytes],
    names: bytes,
    values: bytes,
    services: bytes = b"",
) -> bytes:
    """Join the parts of a report: those of the layout, in its order."""
    machine, group, zone = texts
    size = HEADER.size + len(values) + len(machine) + len(group) + len(zone) + len(names) + len(services)
    if size > BYTES_MAX:
        raise messages.MessageTooLarge(f"a report of {size} bytes is over {BYTES_MAX}")
    head = HEADER.pack(
        MAGIC, len(machine), len(group), len(zone), len(values) // 8, len(names), len(services), *numbers
    )
    return b"".join((head, values, machine, group, zone, names, services, bytes(-size % 8)))


@functools.lru_cache(maxsize=64)
def pack_names(names: tuple[str, ...]) -> bytes:
    if not names:
        return b""
    data = msgspec.json.encode(names)
    if len(data) > NAMES_BYTES_MAX:
        raise messages.MessageTooLarge(f"names of metrics of {len(data)} bytes are over {NAMES_BYTES_MAX}")
    return zlib.compress(data, 9)


def unpack_names(data: bytes) -> tuple[str, ...]:
    if not data:
        return ()
    try:
        # Bounded: a few bytes of a hostile sender may expand to a thousand times their size.
        inflate = zlib.decompressobj()
        plain = inflate.decompress(data, NAMES_BYTES_MAX)
        if not inflate.eof or inflate.unused_data:
            raise messages.MalformedMessage("the names of metrics have no end, or an end within")
        names = _names.decode(plain)
    except (zlib.error, *_INVALID) as error:
        raise messages.MalformedMessage(f"the names of metrics cannot be read: {str(error)[:200]}") from error
    if len(set(names)) < len(names):
        raise messages.MalformedMessage("two metrics of one report have the same name")
    return names


def unpack_services(data: bytes) -> tuple[messages.ServiceReport, ...]:
    try:
        return _services.decode(data) if data else ()
    except _INVALID as error:
        raise messages.MalformedMessage(f"the services cannot be read: {str(error)[:200]}") from error


def is_valid(service: messages.ServiceReport) -> bool:
    """Whether a reader would accept the service: a constructor checks no lengths."""
    try:
        return bool(unpack_services(msgspec.json.encode([service])))
    except (messages.MalformedMessage, UnicodeEncodeError):
        return False


def decode(data: bytes) -> messages.NodeReport:
    """The report; `MalformedMessage` if it is none."""
    if data[: len(MAGIC)] != MAGIC:
        raise messages.UnknownMessageKind("not a packed report, or one of another version")
    if len(data) < HEADER.size:
        raise messages.MalformedMessage("a packed report ends within its fixed fields")
    _, *sizes, boot, sequence, at_ms, period_s, dropped = HEADER.unpack_from(data)
    machine, group, zone, count, names, services = sizes
    ends = [HEADER.size + 8 * count]
    for size in (machine, group, zone, names, services):
        ends.append(ends[-1] + size)
    if len(data) != ends[-1] + -ends[-1] % 8:
        raise messages.MalformedMessage("a packed report of another length than its parts")
    parts = [data[start:end] for start, end in itertools.pairwise(ends)]
    try:
        texts: Any = {
            field: part.decode() for field, part in zip(("machine", "group", "zone"), parts, strict=False)
        }
    except UnicodeDecodeError as error:
        raise messages.MalformedMessage(f"a name that is not Unicode: {error}") from error
    metrics = unpack_names(parts[3])
    values = struct.unpack_from(f"<{count}d", data, HEADER.size)
    if len(metrics) != count:
        raise messages.MalformedMessage(f"{count} values for {len(metrics)} names of metrics")
    fields = {
        "kind": "node-report/1",
        **texts,
        "boot": boot,
        "sequence": sequence,
        "at_ms": at_ms,
        "period_s": period_s,
        "dropped": dropped,
        "metrics": dict(zip(metrics, values, strict=True)),
        "services": unpack_services(parts[4]),
    }
    try:
        return msgspec.convert(fields, messages.NodeReport)
    except msgspec.ValidationError as error:
        raise messages.MalformedMessage(f"a packed report with a wrong value: {error}") from error

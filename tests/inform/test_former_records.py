"""A log that begins with records of the former format: one message each, on a subject of its key."""

from __future__ import annotations

import pytest

from muster.bus import api
from muster.core import errors
from muster.inform import client, protocol
from muster.inform.node.log import context_log
from muster.testing.eventually import eventually


async def fill(bus: api.Bus) -> api.Stream:
    """As 0.1.0 left it: three versions of ``a``, ``b`` moved, ``c`` deleted, and a record of its own."""
    settings = api.StreamSettings(
        protocol.STREAM,
        subjects=(f"{protocol.FORMER_SUBJECTS}*.*",),
        max_bytes=1 << 20,
        max_age_s=0.0,
        max_messages_per_subject=2,
        on_full=api.FullPolicy.REFUSE,
    )
    stream = await bus.stream(settings)

    async def put(key: str, value: bytes | None, reason: str = "put", version: int = 0) -> int:
        record = protocol.ContextRecord(
            key, ("n1",), 7 << 16, "n1", value, b"", version, 0, "ann", f"{key}{value!r}", reason
        )
        return int(await stream.publish(protocol.former_subject(key), protocol.encode(record)))

    for value in (b"1", b"2", b"3"):
        await put("a", value)
    await put("b", b"v", "place", await put("b", b"v"))
    await put("c", b"v")
    await put("c", None, "delete")
    await put("\0confirmed n1", None, "confirm")
    return stream


async def test_contexts_of_the_former_log_keep_values_and_versions(start_node, inform, connect, tmp_path):
    await fill(await connect("operator"))
    for _ in range(2):  # from the log, then with a view
        node = await start_node("n1", view=tmp_path / "n1.db", replicas=1)
        assert node.follower.malformed == 0
        context = await inform.get("a", max_staleness_s=0.0)
        assert (context.value, context.version) == (b"3", 3)
        assert [(change.value, change.version) for change in (await inform.history("a")).changes] == [
            (b"2", 2),
            (b"3", 3),
        ]
        assert (await inform.get("b")).version == 4
        with pytest.raises(errors.NotFound):
            await inform.get("c")
        await node.close()
    await start_node("n1", view=tmp_path / "n1.db", replicas=1)
    written = await inform.put("a", b"4", expected_version=3)
    assert written.version > 3
    watched = inform.watch("a", after_version=2)
    assert [(await anext(watched)).value for _ in range(2)] == [b"3", b"4"]
    again = protocol.PutContext("b", b"v", request="bb'v'", repeat=True)
    assert (await client.InformClient(inform._bus).write(again)).version == 4, "it was executed before"
    for number in range(5):
        await inform.put(f"new{number}", b"v")
    second = await start_node("n2")
    await eventually(lambda: second.directory.nodes == ["n1"])
    away = client.InformClient(inform._bus, node="n2")
    assert len((await away.find("TRUE")).contexts) == 7, "the log keeps all pages of a node"


async def test_a_node_of_the_former_release_cannot_append_any_more(start_node, connect):
    stream = await fill(await connect("operator"))
    await start_node("n1", replicas=1)
    record = protocol.encode(protocol.ContextRecord("a", ("n1",), 8 << 16, "n1", b"late"))
    with pytest.raises(errors.Unavailable):
        await stream.publish(protocol.former_subject("a"), record, timeout_s=1.0)


async def test_a_record_under_the_subject_of_another_key_is_invalid(start_node, connect):
    stream = await fill(await connect("operator"))
    record = protocol.encode(protocol.ContextRecord("a", ("n1",), 8 << 16, "n1", b"forged"))
    await stream.publish(protocol.former_subject("b"), record)
    node = await start_node("n1", replicas=1)
    assert node.follower.malformed == 1
    assert node.reader.local("a").value == b"3"
    with pytest.raises(errors.InvalidInput, match="invalid"):
        context_log.decode_page(
            api.StoredMessage(
                protocol.page_subject("n1"), protocol.encode(protocol.ContextLogPage(9)), {}, 9, 0
            )
        )

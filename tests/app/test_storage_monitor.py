"""The storage of a domain: writes that are not acknowledged, and messages that were stored and are lost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from muster.app import domain
from muster.app.components import dispatcher
from muster.app.operations import storage_monitor
from muster.bus import api
from muster.bus.brokers import control
from muster.bus.client import client
from muster.bus.streams import integrity
from muster.core import errors, messages
from muster.message import settings as message_settings
from muster.testing.eventually import eventually
from muster.trust.permissions import roles
from tests import disks

LOG = api.StreamSettings("log", ("topic.log.>",), max_bytes=16 << 20)


def parts(running: domain.Domain) -> dict[str, Any]:
    return running._group.health()


async def fill(running: domain.Domain, count: int = 300, replicas: int = 1) -> None:
    async with await running.connect("op", roles.Role.OPERATOR) as bus:
        settings = api.StreamSettings(LOG.name, LOG.subjects, max_bytes=LOG.max_bytes, replicas=replicas)
        stream = await bus.stream(settings)
        await asyncio.gather(*(stream.publish(f"topic.log.{n % 7}", b"x" * 1000) for n in range(count)))


def damage(folder: Path, *, index: bool = False) -> None:
    """Flip 64 bytes in the middle of the stream's messages; ``index``: the broker must read them again."""
    (block,) = folder.rglob(f"streams/{LOG.name}/msgs/*.blk")
    data = bytearray(block.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 64] = bytes(byte ^ 0xFF for byte in data[middle : middle + 64])
    block.write_bytes(data)
    if index:
        (block.parent / "index.db").unlink()


# Writes


async def test_a_domain_whose_storage_acknowledges_nothing_is_not_ready(made, monkeypatch):
    monkeypatch.setattr(storage_monitor, "WRITE_PERIOD_S", 0.01)
    monkeypatch.setattr(storage_monitor, "SILENT_S", 0.05)
    message = dispatcher.DispatcherComponent(message_settings.MessageSettings())
    async with domain.Domain(made(), components=[message]) as running:
        assert running.ready
        await eventually(lambda: running._storage._stream is not None)
        stream = running._storage._stream

        async def unacknowledged(*_: object, **__: object) -> int:
            raise errors.TimedOut("no acknowledgement")

        with monkeypatch.context() as patch:
            patch.setattr(stream, "publish", unacknowledged)
            await eventually(lambda: not running.ready)
            await eventually(lambda: parts(running)["message"].state.value == "down")
            assert "no write has been acknowledged" in parts(running)["message"].reason
            await eventually(lambda: "no acknowledgement" in parts(running)["storage"].reason)
        await eventually(lambda: running.ready)
        await eventually(lambda: parts(running)["message"].state.value == "up")


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.may_block(reason="the disk is filled")
async def test_a_domain_with_a_full_disk_is_not_ready_and_names_the_reason(made, small_disk):
    async with domain.Domain(made(domain__data_dir=str(small_disk / "data"))) as running:
        assert running.ready
        ballast = await asyncio.to_thread(disks.fill, small_disk)
        await eventually(lambda: not running.ready, timeout_s=30)
        await eventually(lambda: "disk is full" in parts(running)["storage"].reason, timeout_s=30)

        async def disk() -> float:
            budgets = (await running.status())["budgets"]
            return float(next(row["used_ratio"] for row in budgets if row["name"] == "disk"))

        async def shown_as_full() -> bool:
            return await disk() > 0.99

        await eventually(shown_as_full, timeout_s=30)
        ballast.unlink()
        await eventually(lambda: running.ready, timeout_s=60)


# Losses


@pytest.mark.parametrize("index", [False, True], ids=["one message", "all after it"])
async def test_lost_messages_are_named_in_the_status_the_alerts_and_the_activity_log(made, index):
    async with domain.Domain(made()) as running:
        await fill(running)
        await running._integrity.compare()
        await eventually(lambda: running._integrity.health().is_working)
        folder = running.folder.brokers
    await asyncio.to_thread(damage, folder, index=index)
    async with domain.Domain(made()) as running, await running.connect("op", roles.Role.OPERATOR) as bus:
        await eventually(lambda: not running._integrity.health().is_working)
        (loss,) = running._integrity.losses
        assert loss.stream == "log"
        assert ("to 300" in loss.what) == index
        assert loss.what in parts(running)["integrity"].reason
        assert running.ready, "it goes on with what is there"
        (alert,) = [row for row in await control.BrokerControl(bus).alerts() if row.rule == "storage"]
        assert (alert.about, alert.severity) == ("stream:log", messages.Severity.CRITICAL)

        async def recorded() -> list[messages.Decision]:
            try:
                audit = await bus.open_stream(messages.DECISIONS_STREAM)
            except errors.NotFound:  # it is created with the first record
                return []
            end = (await audit.state()).last_sequence
            rows = [messages.decode(row.data, messages.Decision) async for row in audit.read(1, end)]
            return [row for row in rows if row.what == "data-lost"]

        (decision,) = await eventually(recorded)
        assert (decision.target, decision.outcome) == ("log", messages.DecisionOutcome.FAILED)
        await running._integrity.compare()
        await running._integrity.read_all()
        assert len(running._integrity.losses) == 1, "it is reported once"
    async with domain.Domain(made()) as running:
        assert len(running._integrity.losses) == 1, "and shown after a restart"


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_damaged_replica_is_restored_from_the_other_brokers(made):
    async with domain.Domain(made(bus__brokers=3)) as running:
        await fill(running, replicas=3)
        folder = running.folder.brokers
        async with await running.connect("op", roles.Role.OPERATOR) as bus:
            assert isinstance(bus, client.NatsBus)
            placed = await integrity.replicas(bus, "log")
            damaged = placed.leader
            assert running.brokers is not None
            member = running.brokers.running[damaged]
            await member.restart(between=lambda: damage(folder / damaged))
            await member.wait_healthy()

            async def leads_again() -> bool:
                if (await integrity.replicas(bus, "log")).leader != damaged:
                    await bus.storage.call(
                        "STREAM.LEADER.STEPDOWN.log", {"placement": {"preferred": damaged}}
                    )
                return (await integrity.replicas(bus, "log")).leader == damaged

            await eventually(leads_again, timeout_s=60)
            (missing,) = await integrity.missing_sequences(bus, "log") or [(0, 0)]
            if missing == (0, 0):  # the pages came from the other replicas: the leader itself
                missing = await first_unreadable(bus)
            assert await running._integrity._restore("log", [missing])

            async def all_have_it() -> bool:
                return await integrity.readable(bus, "log", [(1, 300)])

            assert await eventually(all_have_it, timeout_s=30)
            for name in (damaged, *placed.others):
                blocks = (folder / name).rglob("streams/log/msgs/*.blk")
                assert sum(block.stat().st_size for block in blocks) >= 300_000


async def first_unreadable(bus: client.NatsBus) -> tuple[int, int]:
    for sequence in range(1, 301):
        if not await integrity.readable(bus, "log", [(sequence, sequence)]):
            return sequence, sequence
    raise AssertionError("all are readable")


def test_what_a_stream_lost_since_a_mark():
    mark = integrity.StreamMark("today", 500)
    grown = integrity.StreamMark("today", 501)
    assert integrity.regression(None, mark) == integrity.regression(mark, grown) == ""
    assert integrity.regression(grown, mark) == "the last 1 messages, 501"
    assert integrity.regression(integrity.StreamMark("yesterday", 900), mark) == "", "another stream"
    assert integrity.regression(None, integrity.StreamMark("today", 96, 418_140)) != ""
    known = integrity.StreamMark("today", 96, 418_140)
    assert integrity.regression(known, known) == "", "reported before"


def test_ranges_are_described():
    ranges = integrity.ranges([1, 2, 3, 7, 9, 10, 12, 14, 16, 18])
    assert ranges[:2] == [(1, 3), (7, 7)]
    assert integrity.count(ranges) == 10
    assert integrity.describe(ranges) == "1 to 3, 7, 9 to 10, 12, 14 and 2 further ranges"

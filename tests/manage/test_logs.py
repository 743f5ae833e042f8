"""Logs: cursors that survive cuts and restarts, and readers that follow several resources."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
from typing import Any

import msgspec
import pytest

from muster.core import errors, messages
from muster.manage import log_stream, protocol, rows
from muster.manage.adapters import output
from muster.testing.eventually import eventually

LINE = "a line of text\n"


@pytest.fixture
def log(tmp_path: pathlib.Path) -> output.OutputLog:
    return output.OutputLog(lambda: tmp_path / "thing")


def write(log: output.OutputLog, data: str | bytes) -> None:
    descriptor = log.open()
    try:
        os.write(descriptor, data.encode() if isinstance(data, str) else data)
    finally:
        os.close(descriptor)


def page(log: output.OutputLog, now_ms: int = 0, **query: Any) -> protocol.LogPage:
    return log.page(msgspec.convert(query, protocol.LogQuery), now_ms)


def read_all(log: output.OutputLog, **query: Any) -> str:
    text, is_last = "", False
    while not is_last:
        part = page(log, **query)
        text, is_last, query = text + part.text, part.is_last, {**query, "cursor": part.cursor}
        query.pop("lines", None)
    return text


# Positions


def test_a_log_that_was_not_written_is_empty_and_can_be_followed(log):
    first = page(log, lines=10)
    assert (first.text, first.is_last) == ("", True)
    write(log, "begun\n")
    assert page(log, cursor=first.cursor).text == "begun\n"


@pytest.mark.parametrize(
    ("lines", "text"), [(0, ""), (1, "c\n"), (2, "b\nc\n"), (3, "a\nb\nc\n"), (9, "a\nb\nc\n")]
)
def test_the_last_lines(log, lines, text):
    write(log, "a\nb\nc\n")
    assert page(log, lines=lines).text == text


def test_a_line_that_is_not_complete_counts(log):
    write(log, "a\nb\nc")
    assert page(log, lines=2).text == "b\nc"


def test_pages_add_up_and_each_fits(log):
    text = "".join(f"{number} \x01 ü\n" for number in range(5_000))
    write(log, text)
    assert read_all(log, bytes_max=1_000) == text
    assert len(msgspec.json.encode(page(log, bytes_max=1_000).text)) <= 1_000


def test_a_character_is_not_divided(log):
    write(log, "ü".encode()[:1])
    first = page(log)
    assert (first.text, first.is_last) == ("", True)
    write(log, "ü".encode()[1:] + b"!")
    assert page(log, cursor=first.cursor).text == "ü!"


def test_bytes_that_are_no_text_are_replaced(log):
    write(log, b"a\xff\xfeb\n")
    assert read_all(log, bytes_max=64) == "a\ufffd\ufffdb\n"


def test_since_omits_nothing_and_begins_at_a_sample(log):
    write(log, "early\n")
    log.look(1_000)
    write(log, "middle\n")
    log.look(6_000)
    log.look(11_000)
    write(log, "late\n")
    assert page(log, 20_000, since_s=30).text == "early\nmiddle\nlate\n"
    assert page(log, 20_000, since_s=18).text == "middle\nlate\n"
    assert page(log, 20_000, since_s=10).text == "late\n"
    assert page(log, 20_000, since_s=30, lines=1).text == "late\n"


def test_samples_are_bounded(log, monkeypatch):
    monkeypatch.setattr(output, "SAMPLES_MAX", 20)
    index = output.LogIndex("id")
    for number in range(1, 1_000):
        index.add(number * 1_000, number)
    assert len(index.samples) <= 20
    assert index.since(999_500) == 999
    assert index.samples == sorted(index.samples)


def test_a_cursor_survives_a_cut_and_a_reader_that_was_too_slow_is_told(log, monkeypatch):
    monkeypatch.setattr(output, "BYTES_MAX", 40 * len(LINE))
    write(log, LINE * 10)
    slow, fast = page(log, lines=0), page(log, lines=0)
    write(log, LINE * 40)
    fast = page(log, cursor=fast.cursor)
    log.look(1)
    assert log.path.stat().st_size == 20 * len(LINE)
    write(log, "new\n")
    assert page(log, cursor=fast.cursor).text == "new\n"
    late = page(log, cursor=slow.cursor)
    assert late.dropped == 20 * len(LINE)
    assert late.text == LINE * 20 + "new\n"


def test_a_line_that_is_written_during_a_cut_is_kept(log, monkeypatch):
    monkeypatch.setattr(output, "BYTES_MAX", 40 * len(LINE))
    write(log, LINE * 50)
    reader = page(log)
    opened = os.open

    def write_late(path: Any, flags: int, *more: Any) -> int:
        descriptor = opened(path, flags, *more)
        os.write(descriptor, b"late\n")
        return descriptor

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", write_late)
        log.look(1)
    assert page(log, cursor=reader.cursor).text == "late\n"


def test_a_cursor_survives_the_agent(log, tmp_path):
    write(log, "one\n")
    cursor = page(log).cursor
    log.look(1_000)
    write(log, "two\n")
    again = output.OutputLog(lambda: tmp_path / "thing")
    assert page(again, cursor=cursor).text == "two\n"
    assert page(again, 20_000, since_s=10).text == "two\n"


def test_the_cursor_of_another_machine_begins_at_the_start(log, tmp_path):
    other = output.OutputLog(lambda: tmp_path / "other")
    write(other, "there\n" * 100)
    write(log, "here\n")
    assert page(log, cursor=page(other).cursor, lines=0).text == "here\n"


@pytest.mark.parametrize("damage", [b"", b"{", b'{"id": 7}', b"\xff"])
def test_a_damaged_index_begins_anew(log, tmp_path, damage):
    write(log, "one\n")
    page(log)
    (tmp_path / "thing" / "output.index").write_bytes(damage)
    assert page(output.OutputLog(lambda: tmp_path / "thing")).text == "one\n"


# Readers


def talker(name: str, words: str, agent: str = "host-a", group: str = "default") -> dict[str, Any]:
    return {
        "name": name,
        "type": "process",
        "agent": agent,
        "group": group,
        "restart": {"delay_s": 0.05},
        "config": {"command": ["sh", "-c", f"{words}; exec sleep 1000"]},
    }


def manifest(*entries: dict[str, Any]) -> str:
    return json.dumps({"resources": entries})


class Follower:
    """Follows logs in the background."""

    def __init__(self, fleet: Any, *names: str, **options: Any) -> None:
        self.items: list[rows.LogLine] = []
        self.notes: list[str] = []
        stream = fleet.client.log_lines(*names, follow=True, note=self.notes.append, **options)
        self.task = asyncio.create_task(self._follow(stream))

    async def _follow(self, stream: Any) -> None:
        async with contextlib.aclosing(stream):
            async for item in stream:
                self.items.append(item)

    def lines(self, name: str) -> list[str]:
        return [item.line for item in self.items if item.resource == name]

    async def __aenter__(self) -> Follower:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


@pytest.fixture
async def small(fleet):
    fleet.reg = await fleet.registry()
    fleet.man = await fleet.manager()
    fleet.host = await fleet.agent()
    return fleet


async def begin(fleet: Any, *entries: dict[str, Any]) -> None:
    await fleet.client.apply(manifest(*entries))
    for entry in entries:
        await fleet.client.wait(entry["name"], "up")


async def test_the_last_lines_of_a_resource(small):
    await begin(small, talker("web", "for i in 1 2 3; do echo $i; done"))

    async def last():
        return await small.client.logs("web", lines=2) == "2\n3\n"

    await eventually(last)
    with pytest.raises(errors.NotFound, match="wob"):
        await small.client.logs("wob")


async def test_following_survives_restarts_of_resource_agent_and_manager(small, tmp_path):
    gate = tmp_path / "gate"
    gate.touch()
    words = f"echo began; tail -n +1 -f {gate} & wait"
    await begin(small, talker("web", words))
    async with Follower(small, "web") as reader:

        async def say(words: str) -> None:
            def append() -> None:
                with gate.open("a") as file:
                    file.write(f"{words}\n")

            await asyncio.to_thread(append)
            await eventually(lambda: reader.lines("web")[-1:] == [words])

        await say("one")
        await small.host.stop()
        small.host = await small.agent("host-a")
        await say("two")
        await small.man.abandon()
        await small.manager("manager-2")
        await say("three")
        assert reader.lines("web") == ["began", "one", "two", "three"], "nothing twice, nothing lost"
        await small.client.execute("web", "restart")
        await eventually(lambda: reader.lines("web").count("began") == 2)


async def test_several_are_merged_and_new_ones_join(small, monkeypatch):
    monkeypatch.setattr(log_stream, "FIND_S", 0.2)
    await begin(small, talker("a", "echo from a", group="web"), talker("b", "echo from b", group="web"))
    async with Follower(small, where="group = 'web'") as reader:
        await eventually(lambda: {item.resource for item in reader.items} == {"a", "b"})
        await begin(small, talker("c", "echo from c", group="web"))
        await eventually(lambda: reader.lines("c") == ["from c"])
        assert reader.lines("a") == ["from a"]
        await small.client.delete("a", "b", "c")
        await eventually(lambda: {note[:2] for note in reader.notes} == {"a:", "b:", "c:"})
        await begin(small, talker("d", "echo from d", group="web"))
        await eventually(lambda: reader.lines("d") == ["from d"])


async def test_following_ends_with_the_last_of_the_named(small, monkeypatch):
    monkeypatch.setattr(log_stream, "FIND_S", 0.2)
    await begin(small, talker("a", "echo from a"), talker("b", "echo from b"))
    async with Follower(small, "a", "b") as reader:
        await eventually(lambda: len(reader.items) == 2)
        await small.client.delete("a")
        await eventually(lambda: any("a: " in note for note in reader.notes))
        assert not reader.task.done()
        await small.client.delete("b")
        await reader.task


async def test_a_machine_that_does_not_reply_delays_no_other(small):
    second = await small.agent("host-b")
    beat = "while :; do echo tick; sleep 0.1; done"
    await begin(small, talker("a", beat), talker("b", "echo b", agent="host-b"))
    async with Follower(small, "a", "b") as reader:
        await eventually(lambda: reader.lines("b") == ["b"])
        await second.stop()
        seen = len(reader.lines("a"))
        await eventually(lambda: any("b: " in note for note in reader.notes))
        assert len(reader.lines("a")) > seen, "while host-b was waited for"
        assert len([note for note in reader.notes if note.startswith("b: ")]) == 1, "each problem once"


async def test_reading_leaves_no_record_and_does_not_wait_for_a_stop(small):
    stubborn = talker("web", "trap '' TERM; echo on; while :; do sleep 0.05; done")
    stubborn["config"]["stop_s"] = 600
    await begin(small, stubborn)
    stop = asyncio.create_task(small.client.exec("stop", "web", timeout_s=60))
    hosted = small.host.hosted["web"]
    await eventually(hosted.lock.locked)
    before = dict(hosted.record.operations)
    async with asyncio.timeout(10):
        assert await small.client.logs("web") == "on\n"
    assert hosted.record.operations == before
    stop.cancel()
    await asyncio.gather(stop, return_exceptions=True)
    os.kill(hosted.observed.properties["pid"], 9)


async def test_only_those_who_may_execute_may_read_logs(fleet):
    asked: list[tuple[str, bool]] = []

    async def authorize(identity: str, verb: str, changes: bool) -> bool:
        asked.append((verb, changes))
        if verb == protocol.LOGS and changes:
            raise errors.Forbidden(f"{identity} may not read logs")
        return False

    await fleet.registry(authorize=authorize)
    await fleet.manager()
    await fleet.agent()
    await begin(fleet, talker("web", "echo on"))
    with pytest.raises(errors.Forbidden, match="may not read logs"):
        await fleet.client.logs("web")


async def test_what_cannot_be_read_is_refused_with_the_reason(small):
    await begin(small, talker("web", "echo on"))
    epoch = small.host.hosted["web"].record.epoch
    operation = protocol.Operation(
        id="late",
        verb=protocol.Verb.EXECUTE,
        resource="web",
        epoch=epoch - 1,
        operation=protocol.LOG_PAGE,
    )
    late = await small.host.execute(operation)
    assert late.code == errors.StaleEpoch.code
    wrong = msgspec.structs.replace(operation, id="wrong", epoch=epoch, arguments={"bytes_max": 1 << 40})
    answer = await small.host.execute(wrong)
    assert answer.outcome is messages.DecisionOutcome.REFUSED
    assert "bytes_max" in answer.reason
    await begin(small, {"name": "mem", "type": "memory", "agent": "host-a"})
    with pytest.raises(errors.Unavailable, match="the type memory have no log"):
        await small.client.logs("mem")

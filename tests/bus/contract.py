"""The contract of `api.Bus`, for the real bus and its simulated twin."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from muster.bus import api
from muster.core import errors
from muster.testing.eventually import eventually, throughout

Connect = Callable[..., Awaitable[api.Bus]]


async def take(source: Any, count: int) -> list[Any]:
    """The first ``count`` things of an asynchronous iterator."""
    taken: list[Any] = []
    if count == 0:
        return taken
    async with asyncio.timeout(30):
        async for item in source:
            taken.append(item)
            if len(taken) == count:
                break
    return taken


async def collect(source: Any) -> list[Any]:
    return [item async for item in source]


async def collect_into(actual: list[Any], source: Any) -> None:
    async for item in source:
        actual.append(item)  # noqa: PERF401 - items before an error are kept


async def fill(publish: Callable[[int], Awaitable[object]], count: int) -> None:
    for number in range(count):
        await publish(number)


class Messages:
    """Publish, subscribe, request, gather."""

    async def test_a_message_reaches_a_subscriber_of_another_connection(self, connect: Connect):
        sender, receiver = await connect("sender"), await connect("receiver")
        subscription = await receiver.subscribe("news.today")
        await sender.publish("news.today", b"hello", headers={"Lang": "en"}, reply="answers")
        message = await subscription.next(timeout_s=30)
        assert (message.subject, message.data, message.reply) == ("news.today", b"hello", "answers")
        assert message.headers["Lang"] == "en"
        assert subscription.statistics().delivered == 1

    async def test_order_of_one_publisher_is_kept(self, connect: Connect):
        sender, receiver = await connect("sender"), await connect("receiver")
        subscription = await receiver.subscribe("n")
        for number in range(500):
            await sender.publish("n", b"%d" % number)
        assert [int(m.data) for m in await take(subscription, 500)] == list(range(500))

    @pytest.mark.parametrize(
        ("pattern", "subject", "expected"),
        [
            ("a.*.c", "a.b.c", True),
            ("a.*.c", "a.b.d", False),
            ("a.*", "a.b.c", False),
            ("a.>", "a.b.c", True),
            ("a.>", "a", False),
            (">", "a", True),
            ("a", "a.b", False),
            ("*.*", "a.b", True),
        ],
    )
    async def test_wildcards(self, connect: Connect, pattern: str, subject: str, expected: bool):
        bus = await connect("one")
        wild = await bus.subscribe(pattern)
        tame = await bus.subscribe(subject)
        await bus.publish(subject, b"x")
        await tame.next(timeout_s=30)
        await bus.flush()
        assert wild.statistics().pending == expected

    async def test_a_group_shares_the_messages(self, connect: Connect):
        sender = await connect("sender")
        members = [await (await connect(f"m{n}")).subscribe("work", group="crew") for n in range(3)]
        alone = await (await connect("alone")).subscribe("work")
        for number in range(60):
            await sender.publish("work", b"%d" % number)
        assert len(await take(alone, 60)) == 60
        await sender.flush()
        await eventually(lambda: sum(member.statistics().pending for member in members) == 60)
        shares = [await take(member, member.statistics().pending) for member in members]
        assert sorted(int(m.data) for share in shares for m in share) == list(range(60))
        assert sum(bool(share) for share in shares) > 1

    async def test_a_request_is_answered(self, connect: Connect):
        asker, server = await connect("asker"), await connect("server")

        async def answer(message: api.Message) -> None:
            await message.respond(message.data.upper(), headers={"Served-By": "server"})

        await server.subscribe("shout", handler=answer)
        reply = await asker.request("shout", b"hey")
        assert (reply.data, reply.headers["Served-By"]) == (b"HEY", "server")

    async def test_a_reply_goes_to_the_requesters_reply_space_or_nowhere(self, connect: Connect):
        """A reply subject is the asker's word; it must not make the server speak where the asker may not."""
        asker, server = await connect("asker"), await connect("server")
        questions, elsewhere = await server.subscribe("shout"), await server.subscribe("muster.>")
        replies = (
            None,
            "muster.bus.from.server.alert",
            "_INBOX.asker.x",
            "_R.server.x",
            "$JS.API.STREAM.DELETE.s",
        )
        for reply in replies:
            await asker.publish("shout", b"hey", reply=reply)
            with pytest.raises(errors.InvalidInput, match=r"has no reply subject|not below '_R\.app\.'"):
                await (await questions.next(timeout_s=30)).respond(b"x")
        await server.flush()
        assert elsewhere.statistics().delivered == 0

    async def test_a_request_without_a_listener_fails_at_once(self, connect: Connect):
        bus = await connect("one")
        async with asyncio.timeout(30):
            with pytest.raises(errors.Unavailable) as caught:
                await bus.request("nobody.home", b"", timeout_s=90)
        assert not isinstance(caught.value, errors.TimedOut)

    async def test_a_request_without_a_reply_times_out(self, connect: Connect):
        bus = await connect("one")
        await bus.subscribe("silent")
        with pytest.raises(errors.TimedOut):
            await bus.request("silent", b"", timeout_s=0.05)

    async def test_a_request_without_a_reply_is_repeated(self, connect: Connect):
        server, caller = await connect("server"), await connect("caller")
        received: list[bytes] = []

        async def reply_to_the_third(message: api.Message) -> None:
            received.append(message.data)
            if len(received) == 3:
                await message.respond(b"done")

        await server.subscribe("work", handler=reply_to_the_third)
        repeat = api.Repetition(0.02, data=b"again")
        reply = await caller.request("work", b"first", timeout_s=30, repeat=repeat)
        assert reply.data == b"done"
        assert received == [b"first", b"again", b"again"]

    async def test_a_repetition_may_go_to_another_server(self, connect: Connect):
        server, caller = await connect("server"), await connect("caller")
        await server.subscribe("muster.x.to.frozen.work", handler=lambda _: None)

        async def late_reply(message: api.Message) -> None:
            await message.respond(message.subject.encode())

        await server.subscribe("muster.x.to.frozen.other", handler=late_reply)
        repeat = api.Repetition(0.02, "muster.x.to.frozen.other")
        reply = await caller.request("muster.x.to.frozen.work", b"", timeout_s=30, repeat=repeat)
        assert reply.data == b"muster.x.to.frozen.other"

    async def test_a_reply_to_the_first_attempt_counts_after_a_repetition(self, connect: Connect):
        server, caller = await connect("server"), await connect("caller")
        first: list[api.Message] = []

        async def reply_late(message: api.Message) -> None:
            first.append(message)
            if len(first) == 2:
                await first[0].respond(b"the first")

        await server.subscribe("work", handler=reply_late)
        reply = await caller.request("work", b"", timeout_s=30, repeat=api.Repetition(0.02))
        assert reply.data == b"the first"

    async def test_a_repeatable_request_without_a_subscriber_fails_at_once(self, connect: Connect):
        caller = await connect("caller")
        with pytest.raises(errors.Unavailable) as caught:
            await caller.request("absent", b"", timeout_s=30, repeat=api.Repetition(20.0))
        assert not isinstance(caught.value, errors.TimedOut)

    async def test_a_subscriber_that_is_gone_at_the_repetition_leaves_the_outcome_unknown(
        self, connect: Connect
    ):
        server, caller = await connect("server"), await connect("caller")
        subscription = await server.subscribe("work")
        asking = asyncio.create_task(caller.request("work", b"", timeout_s=0.5, repeat=api.Repetition(0.1)))
        await subscription.next(timeout_s=30)
        await subscription.close()
        with pytest.raises(errors.TimedOut):
            await asking

    async def test_gather_collects_until_there_are_enough(self, connect: Connect):
        asker = await connect("asker")
        for number in range(4):
            server = await connect(f"s{number}")

            async def answer(message: api.Message, number: int = number) -> None:
                await message.respond(b"%d" % number)

            await server.subscribe("roll.call", handler=answer)
        answers = await asker.gather("roll.call", b"", enough=4, timeout_s=30)
        assert sorted(a.data for a in answers) == [b"0", b"1", b"2", b"3"]
        assert len(await asker.gather("roll.call", b"", enough=2, timeout_s=30)) == 2
        assert len(await asker.gather("roll.call", b"", timeout_s=1)) == 4
        async with asyncio.timeout(30):
            assert await asker.gather("nobody.home", b"", timeout_s=90) == []

    async def test_handlers_of_one_subscription_do_not_overlap(self, connect: Connect):
        bus = await connect("one")
        running, most, seen, done = 0, 0, [], asyncio.Event()

        async def handler(message: api.Message) -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1
            seen.append(int(message.data))
            if len(seen) == 50:
                done.set()

        await bus.subscribe("h", handler=handler)
        for number in range(50):
            await bus.publish("h", b"%d" % number)
        async with asyncio.timeout(30):
            await done.wait()
        assert (most, seen) == (1, list(range(50)))

    async def test_a_handler_that_raises_is_counted_and_continues(self, connect: Connect, caplog):
        bus = await connect("one")
        seen: list[bytes] = []
        done = asyncio.Event()

        def handler(message: api.Message) -> None:
            if message.data == b"bad":
                raise ValueError("no")
            seen.append(message.data)
            done.set()

        subscription = await bus.subscribe("h", handler=handler)
        await bus.publish("h", b"bad")
        await bus.publish("h", b"good")
        async with asyncio.timeout(30):
            await done.wait()
        assert subscription.statistics().failed == 1
        assert seen == [b"good"]

    async def test_a_bulk_handler_receives_all_messages_in_order_and_may_fail(self, connect: Connect):
        bus = await connect("one")
        seen: list[tuple[bytes, bytes]] = []

        def handler(subjects: Sequence[bytes], data: Sequence[bytes]) -> None:
            assert len(subjects) == len(data) > 0
            seen.extend(zip(subjects, data, strict=True))
            if b"bad" in data:
                raise ValueError("no")

        subscription = await bus.subscribe("b.*", bulk=handler)
        other = await bus.subscribe("b.*")
        for number in range(1000):
            await bus.publish(f"b.{number % 3}", b"bad" if number == 500 else b"%d" % number)
        await bus.flush()
        messages = [await other.next(timeout_s=30) for _ in range(1000)]
        assert seen == [(message.subject.encode(), message.data) for message in messages]
        assert subscription.statistics().failed == 1
        assert subscription.statistics().delivered == 1000
        await subscription.close()
        await bus.publish("b.1", b"")
        await other.next(timeout_s=30)
        assert len(seen) == 1000
        with pytest.raises(errors.InvalidInput):
            await bus.subscribe("b", bulk=handler, handler=lambda _: None)
        with pytest.raises(errors.InvalidInput):
            await subscription.next(timeout_s=1)

    async def test_closing_a_subscription_ends_its_iteration(self, connect: Connect):
        bus = await connect("one")
        subscription = await bus.subscribe("s")
        await bus.publish("s", b"1")
        await bus.flush()
        await subscription.close()
        await bus.publish("s", b"2")
        await bus.flush()
        assert [m.data for m in await collect(subscription)] == [b"1"]
        with pytest.raises(errors.NotConnected):
            await subscription.next(timeout_s=30)

    @pytest.mark.parametrize(
        ("overflow", "kept"),
        [(api.OverflowPolicy.DROP_OLDEST, [6, 7, 8, 9]), (api.OverflowPolicy.DROP_NEWEST, [0, 1, 2, 3])],
    )
    async def test_a_slow_reader_loses_by_its_policy_and_it_is_counted(
        self, connect: Connect, overflow: api.OverflowPolicy, kept: list[int]
    ):
        bus = await connect("one")
        subscription = await bus.subscribe("s", max_pending=4, overflow=overflow)
        last = await bus.subscribe("s")
        for number in range(10):
            await bus.publish("s", b"%d" % number)
        await take(last, 10)
        await bus.flush()
        assert [int(m.data) for m in await take(subscription, 4)] == kept
        assert subscription.statistics().dropped == 6
        assert bus.statistics().dropped == 6

    async def test_a_slow_reader_may_choose_to_be_closed(self, connect: Connect):
        bus = await connect("one")
        subscription = await bus.subscribe("s", max_pending=4, overflow=api.OverflowPolicy.CLOSE)
        for number in range(10):
            await bus.publish("s", b"%d" % number)
        await bus.flush()
        seen: list[api.Message] = []
        with pytest.raises(errors.Overloaded):
            await collect_into(seen, subscription)
        assert [int(m.data) for m in seen] == [0, 1, 2, 3]
        assert subscription.statistics().dropped == 1

    @pytest.mark.parametrize(("data", "headers"), [(b"x" * 300, None), (b"", {"Name": "x" * 280})])
    async def test_pending_bytes_are_bounded_too(
        self, connect: Connect, data: bytes, headers: api.Headers | None
    ):
        bus = await connect("one")
        subscription = await bus.subscribe("s", max_pending_bytes=1000)
        for _ in range(10):
            await bus.publish("s", data, headers=headers)
        await bus.flush()
        assert subscription.statistics().pending == 3
        assert subscription.statistics().dropped == 7

    @pytest.mark.parametrize("subject", ["", "a b", "a..b", ".a", "a.", "a\r\nb", "a.*", "a.>", "x" * 10_000])
    async def test_bad_subjects_are_refused(self, connect: Connect, subject: str):
        bus = await connect("one")
        with pytest.raises(errors.InvalidInput):
            await bus.publish(subject, b"")

    @pytest.mark.parametrize("headers", [{"a b": "x"}, {"": "x"}, {"A": "x\r\nB: y"}, {"ä": "x"}])
    async def test_bad_headers_are_refused(self, connect: Connect, headers: dict[str, str]):
        bus = await connect("one")
        with pytest.raises(errors.InvalidInput):
            await bus.publish("s", b"", headers=headers)

    async def test_headers_hold_any_text(self, connect: Connect):
        bus = await connect("one")
        subscription = await bus.subscribe("s")
        await bus.publish("s", b"", headers={"Name": "Grüße, 世界: a=b"})
        assert (await subscription.next(timeout_s=30)).headers["Name"] == "Grüße, 世界: a=b"

    async def test_a_message_too_large_is_refused(self, connect: Connect):
        bus = await connect("one")
        with pytest.raises(errors.LimitExceeded):
            await bus.publish("s", b"x" * (8 << 20))

    async def test_state_and_close(self, connect: Connect):
        bus = await connect("one")
        states: list[api.ConnectionState] = []
        end = bus.on_state(states.append)
        assert (bus.state, bus.identity) == (api.ConnectionState.CONNECTED, "one")
        assert bus.connection is not None
        assert bus.broker
        subscription = await bus.subscribe("s")
        for number in range(10):
            await bus.publish("s", b"%d" % number)
        await bus.close()
        assert bus.state is api.ConnectionState.CLOSED
        assert states == [api.ConnectionState.CLOSED]
        assert len(await collect(subscription)) == 10, "what was received is handed out"
        with pytest.raises(errors.NotConnected):
            await bus.publish("s", b"")
        end()
        await bus.close()

    async def test_a_request_that_waits_when_its_connection_closes_is_in_doubt(self, connect: Connect):
        bus, other = await connect("one"), await connect("two")
        requests = await other.subscribe("q")
        waiting = asyncio.create_task(bus.request("q", b"", timeout_s=30))
        await requests.next(timeout_s=30)
        await bus.close()
        with pytest.raises(errors.TimedOut):
            await waiting


def settings(name: str = "log", **more: Any) -> api.StreamSettings:
    return api.StreamSettings(name, more.pop("subjects", (f"{name}.>",)), max_bytes=8 << 20, **more)


def small(name: str, on_full: api.FullPolicy) -> api.StreamSettings:
    return api.StreamSettings(name, (f"{name}.>",), max_bytes=50_000, on_full=on_full)


class Streams:
    """Durable streams."""

    async def test_what_is_published_can_be_read(self, connect: Connect):
        bus = await connect("one")
        stream = await bus.stream(settings())
        for number in range(5):
            assert (
                await stream.publish(f"log.{number % 2}", b"%d" % number, headers={"N": str(number)})
                == number + 1
            )
        assert [(m.subject, m.data, m.headers["N"], m.sequence) for m in await collect(stream.read(1))] == [
            (f"log.{n % 2}", b"%d" % n, str(n), n + 1) for n in range(5)
        ]
        assert [m.sequence for m in await collect(stream.read(2, 4))] == [2, 3, 4]
        assert [m.sequence for m in await collect(stream.read(1, subject="log.1"))] == [2, 4]
        assert (await stream.get(3)).data == b"2"
        last = await stream.last_for("log.1")
        assert last is not None
        assert (last.data, last.sequence) == (b"3", 4)
        assert await stream.last_for("log.none") is None
        state = await stream.state()
        assert (state.first_sequence, state.last_sequence, state.messages) == (1, 5, 5)

    async def test_subscribers_receive_stored_messages(self, connect: Connect):
        bus = await connect("one")
        stream = await bus.stream(settings())
        subscription = await bus.subscribe("log.>")
        await stream.publish("log.a", b"x")
        assert (await subscription.next(timeout_s=30)).data == b"x"

    async def test_reading_past_the_end_or_into_nothing(self, connect: Connect):
        bus = await connect("one")
        stream = await bus.stream(settings())
        assert await collect(stream.read(1)) == []
        await stream.publish("log.a", b"x")
        with pytest.raises(errors.NotFound):
            await collect(stream.read(1, 2))
        with pytest.raises(errors.NotFound):
            await stream.get(2)
        with pytest.raises(errors.InvalidInput):
            await collect(stream.read(0))

    async def test_a_short_answer_is_never_silent(self, connect: Connect):
        bus = await connect("one")
        stream = await bus.stream(settings())
        for number in range(1, 9):
            await stream.publish("log.a", b"%d" % number)
        await stream.delete(4)
        assert [m.sequence for m in await collect(stream.read(1, gaps=True))] == [1, 2, 3, 5, 6, 7, 8]
        seen: list[api.StoredMessage] = []
        with pytest.raises(errors.NotFound):
            await collect_into(seen, stream.read(1))
        assert [m.sequence for m in seen] == [1, 2, 3]
        await stream.delete(8)
        for absent in (4, 1000):
            with pytest.raises(errors.NotFound):
                async with asyncio.timeout(5):
                    await stream.delete(absent)
        with pytest.raises(errors.NotFound):
            await collect(stream.read(5, 8))
        await stream.purge(before=3)
        for kwargs in ({}, {"gaps": True}, {"subject": "log.a"}):
            with pytest.raises(errors.NotFound):
                await collect(stream.read(1, 7, **kwargs))
        assert [m.sequence for m in await collect(stream.read(5, 7))] == [5, 6, 7]

    async def test_a_long_read_crosses_many_pages(self, connect: Connect):
        bus = await connect("one")
        stream = await bus.stream(settings())
        await asyncio.gather(*(stream.publish("log.a", b"%d" % n) for n in range(1600)))
        assert [m.sequence for m in await collect(stream.read(1))] == list(range(1, 1601))

    async def test_concurrent_publishes_are_stored_once_in_order(self, connect: Connect):
        bus = await connect("one")
        stream = await bus.stream(settings())
        sequences = await asyncio.gather(*(stream.publish("log.a", b"%d" % n) for n in range(300)))
        assert sequences == list(range(1, 301))
        assert [int(m.data) for m in await collect(stream.read(1))] == list(range(300))

    async def test_one_bad_publish_of_many_fails_alone(self, connect: Connect):
        bus = await connect("one")
        stream = await bus.stream(settings())
        await stream.publish("log.taken", b"first", message_id="known")
        outcomes = await asyncio.gather(
            *(
                stream.publish(
                    "log.taken" if n == 50 else f"log.{n}",
                    b"%d" % n,
                    expected_last_subject_sequence=0 if n in (20, 50) else None,
                    message_id="known" if n == 70 else None,
                )
                for n in range(120)
            ),
            return_exceptions=True,
        )
        assert isinstance(outcomes[50], errors.Conflict)
        assert outcomes[50].actual == 1
        assert outcomes[70] == 1, "a repeat returns the first one's sequence"
        rest = [o for n, o in enumerate(outcomes) if n not in (50, 70) and isinstance(o, int)]
        assert sorted(rest) == list(range(2, 120))
        stored = {m.sequence: m.data for m in await collect(stream.read(1))}
        assert all(stored[o] == b"%d" % n for n, o in enumerate(outcomes) if n not in (50, 70))

    async def test_two_expectations_on_one_subject_at_once(self, connect: Connect):
        bus = await connect("one")
        stream = await bus.stream(settings())
        fill = [stream.publish(f"log.{n}", b"") for n in range(30)]
        race = [stream.publish("log.key", b"%d" % n, expected_last_subject_sequence=0) for n in range(5)]
        outcomes = await asyncio.gather(*fill[:15], *race, *fill[15:], return_exceptions=True)
        winners = [o for o in outcomes[15:20] if isinstance(o, int)]
        assert len(winners) == 1
        assert all(isinstance(o, errors.Conflict) for o in outcomes[15:20] if o not in winners)
        assert all(isinstance(o, int) for o in outcomes[:15] + outcomes[20:])

    async def test_expected_last_sequence(self, connect: Connect):
        bus = await connect("one")
        stream = await bus.stream(settings())
        assert await stream.publish("log.a", b"", expected_last_sequence=0) == 1
        with pytest.raises(errors.Conflict) as caught:
            await stream.publish("log.a", b"", expected_last_sequence=0)
        assert caught.value.actual == 1
        assert await stream.publish("log.a", b"", expected_last_sequence=1) == 2

    async def test_a_message_id_makes_repeats_safe(self, connect: Connect):
        bus = await connect("one")
        stream = await bus.stream(settings())
        first = await stream.publish("log.a", b"x", message_id="m1")
        again = await stream.publish("log.a", b"x", message_id="m1")
        assert (again, type(first), type(again)) == (first, int, api.Duplicate)
        with pytest.raises(errors.Conflict):  # of one replica: expectations come first
            await stream.publish("log.a", b"x", message_id="m1", expected_last_subject_sequence=first - 1)
        again = await stream.publish("log.a", b"x", message_id="m1", expected_last_subject_sequence=first)
        assert isinstance(again, api.Duplicate)
        assert (await stream.state()).messages == 1

    async def test_a_batch_is_all_or_nothing(self, connect: Connect):
        bus = await connect("one")
        stream = await bus.stream(settings())
        subscription = await bus.subscribe("log.>")
        assert await stream.publish_batch([api.OutgoingMessage(f"log.{n}", b"%d" % n) for n in range(3)]) == 3
        with pytest.raises(errors.Conflict):
            await stream.publish_batch(
                [
                    api.OutgoingMessage("log.a", b""),
                    api.OutgoingMessage("log.0", b"", expected_last_subject_sequence=0),
                ]
            )
        assert (await stream.state()).messages == 3
        assert [m.data for m in await take(subscription, 3)] == [b"0", b"1", b"2"]
        for size in (0, 1001):
            with pytest.raises(errors.LimitExceeded):
                await stream.publish_batch([api.OutgoingMessage("log.a", b"")] * size)

    async def test_a_batch_with_message_ids_can_be_repeated(self, connect: Connect):
        bus = await connect("one")
        stream = await bus.stream(settings())
        batch = [api.OutgoingMessage("log.a", b"%d" % n, message_id=str(n)) for n in range(3)]
        assert await stream.publish_batch(batch) == 3
        again = await stream.publish_batch(batch)
        assert (again, type(again)) == (3, api.Duplicate)
        with pytest.raises(errors.AlreadyExists):
            await stream.publish_batch([*batch[1:], api.OutgoingMessage("log.a", b"", message_id="new")])
        assert (await stream.state()).messages == 3

    async def test_subjects_the_stream_does_not_cover(self, connect: Connect):
        bus = await connect("one")
        stream = await bus.stream(settings())
        for subject in ("other.a", "log"):
            with pytest.raises(errors.InvalidInput):
                await stream.publish(subject, b"")
        with pytest.raises(errors.InvalidInput):
            await stream.publish("log.a", b"", headers={"Nats-Msg-Id": "x"})

    async def test_a_full_stream_refuses_or_forgets_by_its_settings(self, connect: Connect):
        bus = await connect("one")
        refusing = await bus.stream(small("r", api.FullPolicy.REFUSE))
        with pytest.raises(errors.LimitExceeded):
            await fill(lambda _: refusing.publish("r.a", b"x" * 1000), 100)
        state = await refusing.state()
        assert state.first_sequence == 1
        assert 30 < state.messages < 50
        assert bus.statistics().refused_full == 1
        forgetting = await bus.stream(small("f", api.FullPolicy.DROP_OLDEST))
        await fill(lambda _: forgetting.publish("f.a", b"x" * 1000), 100)
        state = await forgetting.state()
        assert state.last_sequence == 100
        assert state.first_sequence > 50
        budgets = {budget.stream: budget for budget in await bus.budgets()}
        assert budgets["r"].limit_bytes == 50_000
        assert budgets["r"].on_full is api.FullPolicy.REFUSE
        assert 0.8 < budgets["r"].used_ratio <= 1
        assert 0.8 < budgets["f"].used_ratio <= 1

    async def test_only_limit_changes_the_budget_of_a_stream_that_is_there(self, connect: Connect):
        bus = await connect("one")
        stream = await bus.stream(small("r", api.FullPolicy.REFUSE))
        with pytest.raises(errors.LimitExceeded):
            await fill(lambda _: stream.publish("r.a", b"x" * 1000), 100)
        before = (await stream.state()).messages
        # Another user, with another budget and another subject.
        opened = await bus.stream(
            api.StreamSettings("r", ("r.>", "s.>"), max_bytes=1_000, max_age_s=1.0, duplicate_window_s=1.0)
        )
        assert (await stream.state()).messages == before
        await bus.limit("r", max_bytes=200_000, max_age_s=3600.0, on_full=api.FullPolicy.REFUSE, replicas=1)
        await opened.publish("s.a", b"x" * 1000)
        (budget,) = await bus.budgets()
        assert (budget.limit_bytes, budget.max_age_s, budget.replicas) == (200_000, 3600.0, 1)
        await bus.limit("r", max_bytes=5_000, max_age_s=0.0, on_full=api.FullPolicy.DROP_OLDEST, replicas=1)
        await opened.publish("s.a", b"x")
        assert (await stream.state()).bytes <= 5_000
        with pytest.raises(errors.NotFound):
            await bus.limit("none", max_bytes=1, max_age_s=0.0, on_full=api.FullPolicy.REFUSE, replicas=1)

    async def test_a_big_message_that_does_not_fit_does_not_hurt_small_ones(self, connect: Connect):
        bus = await connect("one")
        stream = await bus.stream(small("r", api.FullPolicy.REFUSE))
        outcomes = await asyncio.gather(
            *(stream.publish("r.a", b"x" * (100_000 if n == 7 else 100)) for n in range(30)),
            return_exceptions=True,
        )
        assert isinstance(outcomes[7], errors.LimitExceeded)
        assert sorted(o for o in outcomes if isinstance(o, int)) == list(range(1, 30))

    async def test_a_stream_needs_a_budget(self, connect: Connect):
        bus = await connect("one")
        with pytest.raises(errors.InvalidInput):
            await bus.stream(api.StreamSettings("x", ("x",), max_bytes=0))

    async def test_streams_are_listed_changed_and_deleted(self, connect: Connect):
        bus = await connect("one")
        stream = await bus.stream(settings())
        await stream.publish("log.a", b"x")
        again = await bus.stream(settings(max_messages_per_subject=1))
        await again.publish("log.a", b"y")
        assert (await again.state()).messages == 1
        assert await bus.streams() == ["log"]
        assert (await bus.open_stream("log")).name == "log"
        created_ns = (await again.state()).created_ns
        await bus.delete_stream("log")
        assert await bus.streams() == []
        for attempt in (bus.open_stream("log"), bus.delete_stream("log"), stream.state()):
            with pytest.raises(errors.NotFound):
                await attempt
        with pytest.raises(errors.InvalidInput):
            await bus.stream(settings("a b"))
        after = await (await bus.stream(settings())).state()
        assert created_ns < after.created_ns <= after.now_ns

    async def test_purge(self, connect: Connect):
        bus = await connect("one")
        stream = await bus.stream(settings())
        for number in range(6):
            await stream.publish(f"log.{number % 2}", b"")
        assert await stream.purge(subject="log.0") == 3
        assert await stream.purge(before=4) == 1
        assert await stream.purge() == 2
        state = await stream.state()
        assert (state.messages, state.first_sequence, state.last_sequence) == (0, 7, 6)

    async def test_messages_with_a_time_to_live_go(self, connect: Connect):
        bus = await connect("one")
        stream = await bus.stream(settings())
        await stream.publish("log.a", b"short", ttl_s=1)
        await stream.publish("log.a", b"long")
        with pytest.raises(errors.InvalidInput):
            await stream.publish("log.a", b"", ttl_s=0.5)

        async def one_is_left() -> bool:
            return (await stream.state()).messages == 1

        await eventually(one_is_left)
        assert (await stream.get(2)).data == b"long"

    async def test_following_a_stream(self, connect: Connect):
        bus, other = await connect("one"), await connect("two")
        stream = await bus.stream(settings())
        for number in range(5):
            await stream.publish(f"log.{number % 2}", b"%d" % number)
        async with stream.follow(2) as following, stream.follow(1, subject="log.1") as odd:
            assert [m.sequence for m in await take(following, 4)] == [2, 3, 4, 5]
            assert [m.sequence for m in await take(odd, 2)] == [2, 4]
            await (await other.open_stream("log")).publish("log.1", b"new")
            assert (await take(following, 1))[0].data == b"new"
            assert (await take(odd, 1))[0].data == b"new"

        async def nobody_follows() -> bool:
            return (await stream.state()).consumers == 0

        await eventually(nobody_follows, what="followers leave nothing behind")
        await stream.purge(before=4)
        async with stream.follow(2) as following:
            with pytest.raises(errors.NotFound):
                await take(following, 1)

    @pytest.mark.parametrize("kwargs", [{"gaps": True}, {"subject": "log.a"}], ids=["gaps", "subject"])
    async def test_followers_that_allow_gaps_are_notified_of_messages_dropped_by_retention(
        self, connect: Connect, kwargs: dict[str, Any]
    ):
        bus = await connect("one")
        stream = await bus.stream(settings())
        for number in range(1, 21):
            await stream.publish("log.a", b"%d" % number)
        await stream.purge(before=16)
        await stream.delete(18)
        async with stream.follow(3, **kwargs) as following:
            with pytest.raises(errors.Dropped) as dropped:
                await take(following, 1)
            assert (dropped.value.first, dropped.value.last) == (3, 15)
            assert [m.sequence for m in await take(following, 4)] == [16, 17, 19, 20]
            await stream.publish("log.a", b"21")
            assert [m.sequence for m in await take(following, 1)] == [21]
        await stream.purge()
        async with stream.follow(21, **kwargs) as following:
            with pytest.raises(errors.Dropped):
                await take(following, 1)
            await stream.publish("log.a", b"22")
            assert [m.sequence for m in await take(following, 1)] == [22]


async def gone(bucket: api.KeyValue, key: str) -> bool:
    return await bucket.get(key) is None


class KeyValues:
    """Key/value buckets."""

    async def test_values_and_revisions(self, connect: Connect):
        bus = await connect("one")
        bucket = await bus.key_value(api.KeyValueSettings("b"))
        assert await bucket.get("k") is None
        first = await bucket.create("k", b"1")
        with pytest.raises(errors.AlreadyExists):
            await bucket.create("k", b"2")
        second = await bucket.update("k", b"2", revision=first)
        assert second > first
        with pytest.raises(errors.Conflict) as caught:
            await bucket.update("k", b"3", revision=first)
        assert caught.value.actual == second
        third = await bucket.put("k", b"3")
        entry = await bucket.get("k")
        assert entry is not None
        assert (entry.key, entry.value, entry.revision) == ("k", b"3", third)
        with pytest.raises(errors.Conflict):
            await bucket.delete("k", revision=second)
        await bucket.delete("k", revision=third)
        assert await bucket.get("k") is None
        fourth = await bucket.create("k", b"4")
        assert fourth > third, "revisions only grow, deletions included"

    async def test_one_of_many_creators_wins(self, connect: Connect):
        buckets = [await (await connect(f"n{n}")).key_value(api.KeyValueSettings("b")) for n in range(5)]
        outcomes = await asyncio.gather(*(b.create("k", b"") for b in buckets), return_exceptions=True)
        assert sum(isinstance(o, int) for o in outcomes) == 1
        assert sum(isinstance(o, errors.AlreadyExists) for o in outcomes) == 4

    KEYS = (
        "plain",
        "with space",
        "a.b.c",
        "a..b",
        ".",
        "",
        "*",
        ">",
        "a.>",
        "=",
        "=41",
        "Grüße/世界",
        "\n",
        "a" * 200,
    )

    async def test_any_string_is_a_key(self, connect: Connect):
        bus = await connect("one")
        bucket = await bus.key_value(api.KeyValueSettings("b"))
        for key in self.KEYS:
            await bucket.create(key, key.encode())
        for key in self.KEYS:
            entry = await bucket.get(key)
            assert entry is not None
            assert (entry.key, entry.value) == (key, key.encode())
        assert await bucket.keys() == sorted(self.KEYS)

    async def test_keys_by_pattern(self, connect: Connect):
        bus = await connect("one")
        bucket = await bus.key_value(api.KeyValueSettings("b"))
        for key in ("a.1", "a.2", "a.2.x", "b.1"):
            await bucket.put(key, b"")
        await bucket.delete("a.1")
        assert await bucket.keys("a.*") == ["a.2"]
        assert await bucket.keys("a.>") == ["a.2", "a.2.x"]
        assert await bucket.keys("none.>") == []

    async def test_watch_gives_what_is_there_then_changes(self, connect: Connect):
        bus, other = await connect("one"), await connect("two")
        bucket = await bus.key_value(api.KeyValueSettings("b"))
        await bucket.put("a", b"1")
        await bucket.put("b", b"1")
        await bucket.put("a", b"2")
        await bucket.put("gone", b"")
        await bucket.delete("gone")
        watch = await bucket.watch()
        seen = await take(watch, 3)
        assert {e.key: e.value for e in seen if e} == {"a": b"2", "b": b"1"}
        assert seen[-1] is None
        there = await other.key_value(api.KeyValueSettings("b"))
        revision = await there.put("c", b"3")
        await there.delete("b")
        changes = await take(watch, 2)
        assert [(e.key, e.value) for e in changes] == [("c", b"3"), ("b", None)]
        assert changes[0].revision == revision
        await watch.close()

    async def test_a_watch_reports_deletions_during_its_initial_part(self, connect: Connect):
        bus, other = await connect("one"), await connect("two")
        bucket = await bus.key_value(api.KeyValueSettings("b"))
        for number in range(50):
            await bucket.put(f"k{number}", b"1")
        there = await other.key_value(api.KeyValueSettings("b"))
        seen: dict[str, bytes | None] = {}
        async with await bucket.watch() as watch:
            async for entry in watch:
                if entry is None:
                    continue
                if not seen:
                    await there.delete(entry.key)
                    await there.put("end", b"")
                seen[entry.key] = entry.value
                if entry.key == "end":
                    break
        assert {key for key, value in seen.items() if value is None} == {"k0"}

    async def test_a_watch_reports_that_the_bucket_is_empty(self, connect: Connect):
        bus = await connect("one")
        bucket = await bus.key_value(api.KeyValueSettings("b"))
        async with await bucket.watch("x.*") as watch:
            assert await take(watch, 1) == [None]
            await bucket.put("y.1", b"")
            await bucket.put("x.1", b"v")
            assert [(e.key, e.value) for e in await take(watch, 1)] == [("x.1", b"v")]

    async def test_keys_expire_and_watchers_are_notified(self, connect: Connect):
        bus = await connect("one")
        bucket = await bus.key_value(api.KeyValueSettings("b"))
        revision = await bucket.create("k", b"1", ttl_s=2)
        async with await bucket.watch() as watch:
            assert [e and e.value for e in await take(watch, 2)] == [b"1", None]
            (gone,) = await take(watch, 1)
            assert (gone.key, gone.value) == ("k", None)
        assert await bucket.get("k") is None
        assert await bucket.create("k", b"2") > revision

    async def test_an_update_renews_the_time_to_live(self, connect: Connect):
        bus = await connect("one")
        bucket = await bus.key_value(api.KeyValueSettings("b"))
        revision = await bucket.create("k", b"1", ttl_s=2)
        for _ in range(3):
            await throughout(lambda: bucket.get("k"), for_s=0.8)
            revision = await bucket.update("k", b"1", revision=revision, ttl_s=2)
        await bucket.update("k", b"for ever", revision=revision)
        await bucket.create("other", b"", ttl_s=1)
        await eventually(lambda: gone(bucket, "other"))
        assert await bucket.get("k") is not None

    async def test_a_full_bucket_refuses(self, connect: Connect):
        bus = await connect("one")
        bucket = await bus.key_value(api.KeyValueSettings("b", max_bytes=20_000))
        with pytest.raises(errors.LimitExceeded):
            await fill(lambda number: bucket.put(f"k{number}", b"x" * 1000), 30)
        assert await bucket.get("k0") is not None


class BusContract(Messages, Streams, KeyValues):
    """All of it."""

"""The contract of `bus/rpc`, on any bus."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from muster.bus import api, spans
from muster.bus.rpc import admission, answer_memory, client, origin, request_audit, requests, server
from muster.core import errors, leaky_buckets, messages, subjects
from muster.core.telemetry import otlp
from muster.testing.eventually import eventually

PART = "manage"
O = messages.DecisionOutcome  # noqa: E741


class LampState:
    """A small service."""

    def __init__(self) -> None:
        self.on: list[str] = []
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()

    def operations(self) -> list[server.RpcOperation]:
        return [
            server.RpcOperation("read.state", self.state),
            server.RpcOperation("read.long", self.long),
            server.RpcOperation("read.rows", self.rows),
            server.RpcOperation("request.switch", self.switch),
            server.RpcOperation("request.break", self.fail),
            server.RpcOperation("request.slow", self.slow, timeout_s=0.05),
            server.RpcOperation("request.wait", self.wait),
            server.RpcOperation("request.note", self.switch, audited=False),
        ]

    async def state(self, call: server.RpcCall) -> list[str]:
        return self.on

    async def long(self, call: server.RpcCall, size: int) -> str:
        return "x" * size

    async def rows(self, call: server.RpcCall, after: str = "", limit: int = 200) -> dict[str, Any]:
        return server.page([f"{n:05}" for n in range(6000)], str, after, limit)

    async def switch(self, call: server.RpcCall, name: str, times: int = 1) -> dict[str, Any]:
        self.on += [name] * times
        return {"by": call.actor, "on": len(self.on)}

    async def fail(self, call: server.RpcCall, how: str) -> None:
        if how == "bug":
            raise TypeError("switch() got an unexpected keyword argument 'colour'")
        if how == "conflict":
            raise errors.Conflict("it is on", actual=7, hint="switch it off")
        raise OddRequest("it is odd", hint="even it")

    async def slow(self, call: server.RpcCall) -> None:
        await asyncio.Event().wait()

    async def wait(self, call: server.RpcCall, name: str) -> int:
        self.begun.set()
        await self.go_on.wait()
        self.on.append(name)
        return len(self.on)


class OddRequest(errors.Refused):
    code = "odd"
    exit_code = 9


async def decisions(bus: api.Bus) -> list[messages.Decision]:
    stream = await bus.open_stream(messages.DECISIONS_STREAM)
    return [messages.decode(message.data, messages.Decision) async for message in stream.read(1)]


def ask(bus: api.Bus, operation: str, arguments: Any = None, **options: Any) -> Any:
    return client.call(bus, subjects.from_identity(PART, bus.identity, operation), arguments, **options)


class RpcContract:
    async def test_an_operation_is_carried_out_and_audited_once(self, connect):
        service, ann = await connect("service"), await connect("ann")
        async with server.RpcServer(service, PART, LampState().operations()):
            assert await ask(ann, "request.switch", {"name": "hall", "times": 2}) == {"by": "ann", "on": 2}
            assert await ask(ann, "read.state") == ["hall", "hall"]
            await ask(ann, "request.note", {"name": "cellar"})  # its own log names the writer
        (decision,) = await decisions(service)
        assert (decision.who, decision.what, decision.target, decision.outcome) == (
            "ann",
            "switch",
            "hall",
            O.DONE,
        )

    async def test_a_record_names_the_trace_of_its_request(self, connect):
        service, ann = await connect("service"), await connect("ann")
        ended: list[otlp.FinishedSpan] = []
        async with server.RpcServer(service, PART, LampState().operations()):
            with spans.recorded_to(ended.append):
                await ask(ann, "request.switch", {"name": "hall"})
            await ask(ann, "request.switch", {"name": "cellar"})  # nothing is traced
        traced, plain = await decisions(service)
        assert {span.context.trace_id for span in ended} == {traced.trace_id}
        assert plain.trace_id == ""

    @pytest.mark.parametrize(
        ("operation", "arguments", "kind", "says"),
        [
            ("request.switch", {}, errors.InvalidInput, "missing required field `name`"),
            ("request.switch", {"name": 5}, errors.InvalidInput, "Expected `str`, got `int`"),
            ("request.switch", {"name": "a", "colour": "red"}, errors.InvalidInput, "unknown field `colour`"),
            ("request.break", {"how": "bug"}, errors.InvariantViolation, r"internal error \(TypeError\)"),
            ("request.nothing", {}, errors.NotFound, "no operation 'nothing'"),
            ("request.slow", {}, errors.TimedOut, "not done in 0.05 s"),
        ],
    )
    async def test_an_error_is_the_callers_or_the_services(self, connect, operation, arguments, kind, says):
        service, ann = await connect("service"), await connect("ann")
        async with server.RpcServer(service, PART, LampState().operations()) as serving:
            with pytest.raises(kind, match=says) as caught:
                await ask(ann, operation, arguments)
            assert serving.outcomes[kind.code] == 1
            assert caught.value.exit_code == kind.exit_code

    @pytest.mark.parametrize("value", ["\ud800", object()], ids=["surrogate", "object"])
    async def test_arguments_that_json_cannot_hold_are_refused_before_they_are_sent(self, connect, value):
        with pytest.raises(errors.InvalidInput, match="cannot be sent as JSON"):
            await ask(await connect("ann"), "request.switch", {"name": value})

    async def test_errors_keep_their_facts_and_unknown_codes_their_exit_status(self, connect, monkeypatch):
        service, ann = await connect("service"), await connect("ann")
        async with server.RpcServer(service, PART, LampState().operations()):
            with pytest.raises(errors.Conflict, match="it is on") as caught:
                await ask(ann, "request.break", {"how": "conflict"})
            assert (caught.value.actual, caught.value.hint) == (7, "switch it off")
            with pytest.raises(OddRequest):
                await ask(ann, "request.break", {"how": "odd"})
            # A caller that has not loaded the class.
            monkeypatch.setattr(OddRequest, "code", "another")
            data = b'{"error": {"code": "odd", "kind": "refused", "message": "m", "exit_code": 9}}'
            with pytest.raises(errors.MusterError) as unknown:
                client.result_of(data)
            assert type(unknown.value) is errors.Refused
            assert (unknown.value.code, unknown.value.exit_code) == ("odd", 9)

    async def test_every_outcome_is_in_the_audit(self, connect):
        service, ann = await connect("service"), await connect("ann")
        lamp = LampState()

        async def only_ann(call: server.RpcCall, operation: server.RpcOperation, arguments: Any) -> None:
            if arguments.get("name") == "vault":
                raise errors.Forbidden("not the vault")
            call.on_behalf_of = call.claims_for

        serving = server.RpcServer(service, PART, lamp.operations(), authorize=only_ann)
        async with serving:
            subject = subjects.from_identity(PART, "ann", "request.switch")
            await client.call(ann, subject, {"name": "hall"}, on_behalf_of="eve")
            for operation, arguments in (
                ("request.switch", {"name": "vault"}),
                ("request.switch", {"name": 1}),
                ("request.break", {"how": "bug"}),
                ("request.slow", {}),
            ):
                with pytest.raises(errors.MusterError):
                    await ask(ann, operation, arguments)
            left = asyncio.ensure_future(ask(ann, "request.wait", {"name": "door"}, timeout_s=5))
            await lamp.begun.wait()
        left.cancel()
        actual = [
            (decision.what, decision.target, decision.outcome, decision.on_behalf_of)
            for decision in await decisions(service)
        ]
        assert actual == [
            ("switch", "hall", O.DONE, "eve"),
            ("switch", "vault", O.REFUSED, ""),
            ("switch", "-", O.REFUSED, ""),
            ("break", "-", O.FAILED, ""),
            ("slow", "-", O.IN_DOUBT, ""),
            ("wait", "door", O.IN_DOUBT, ""),
        ]

    async def test_a_request_that_ends_the_service_is_answered(self, connect):
        service, ann = await connect("service"), await connect("ann")
        ended = asyncio.Event()

        async def end(call: server.RpcCall) -> str:
            ended.set()
            return "ended"

        async with server.RpcServer(service, PART, [server.RpcOperation("request.end", end)]):
            requested = asyncio.ensure_future(ask(ann, "request.end", timeout_s=5))
            await ended.wait()
        assert await requested == "ended"
        assert [decision.outcome for decision in await decisions(service)] == [O.DONE]

    async def test_a_repeated_request_is_answered_again_and_not_done_again(self, connect):
        service, ann = await connect("service"), await connect("ann")
        lamp = LampState()
        async with server.RpcServer(service, PART, lamp.operations()):
            subject = subjects.from_identity(PART, "ann", "request.wait")
            headers = {requests.REQUEST_ID: "r1"}
            both = [
                asyncio.ensure_future(ann.request(subject, b'{"name": "a"}', headers=headers))
                for _ in range(2)
            ]
            await lamp.begun.wait()
            lamp.go_on.set()
            answers = {(await item).data for item in both}
            answers.add((await ann.request(subject, b'{"name": "a"}', headers=headers)).data)
            assert answers == {b'{"result":1}'}
            other = await ann.request(subject, b'{"name": "b"}', headers=headers)
            with pytest.raises(errors.Conflict, match="used for another request"):
                client.result_of(other.data)
        assert lamp.on == ["a"]

    async def test_a_client_with_many_requests_pushes_out_its_own_answers_only(self, connect, monkeypatch):
        monkeypatch.setattr(answer_memory, "BYTES_MAX", 8 * answer_memory.ANSWER_BYTES_MIN)
        service, ann, bob = [await connect(name) for name in ("service", "ann", "bob")]
        lamp = LampState()

        async def switch(bus: api.Bus, name: str) -> None:
            subject = subjects.from_identity(PART, bus.identity, "request.note")
            data = f'{{"name": "{name}"}}'.encode()
            await bus.request(subject, data, headers={requests.REQUEST_ID: name})

        async with server.RpcServer(service, PART, lamp.operations()):
            await switch(ann, "first")
            await switch(ann, "second")
            for number in range(30):
                await switch(bob, str(number))
            await switch(ann, "first")
            await switch(ann, "second")
            assert lamp.on.count("first") == lamp.on.count("second") == 1
            await switch(bob, "29")
            assert lamp.on.count("29") == 1
            await switch(bob, "0")  # the oldest of the client that has most
            assert lamp.on.count("0") == 2

    async def test_a_request_that_found_the_service_unavailable_can_be_repeated(self, connect):
        service, ann = await connect("service"), await connect("ann")
        ready: list[str] = []

        async def begin(call: server.RpcCall) -> int:
            if not ready:
                raise errors.Unavailable("not yet")
            return len(ready)

        async with server.RpcServer(service, PART, [server.RpcOperation("request.begin", begin)]):
            subject, headers = (
                subjects.from_identity(PART, "ann", "request.begin"),
                {requests.REQUEST_ID: "r1"},
            )
            with pytest.raises(errors.Unavailable, match="not yet"):
                client.result_of((await ann.request(subject, b"{}", headers=headers)).data)
            ready.append("now")
            assert client.result_of((await ann.request(subject, b"{}", headers=headers)).data) == 1
            ready.append("again")
            assert client.result_of((await ann.request(subject, b"{}", headers=headers)).data) == 1

    async def test_refused_requests_of_one_identity_leave_few_records_and_a_count(self, connect):
        service, ann, eve = [await connect(name) for name in ("service", "ann", "eve")]
        audit = request_audit.RequestAudit(service, PART, refused=leaky_buckets.BucketBudget(3, 300.0))
        async with server.RpcServer(service, PART, LampState().operations(), audit=audit):
            for _ in range(20):
                with pytest.raises(errors.InvalidInput):
                    await ask(eve, "request.switch", {"name": 1})
            with pytest.raises(errors.InvalidInput):
                await ask(ann, "request.switch", {"name": 1})
            await ask(eve, "request.switch", {"name": "hall"})  # what is done is always recorded
            assert audit.refusals.suppressed == 17
        actual = [(decision.who, decision.what, decision.outcome) for decision in await decisions(service)]
        assert actual == [
            *[("eve", "switch", O.REFUSED)] * 3,
            ("ann", "switch", O.REFUSED),
            ("eve", "switch", O.DONE),
            ("eve", "not-recorded", O.REFUSED),
        ]
        last = (await decisions(service))[-1]
        assert last.details == {"count": "17"}
        assert "17 refused or failed requests of eve" in last.why

    async def test_a_record_states_where_the_act_began(self, connect):
        service, ann = await connect("service"), await connect("ann")
        async with server.RpcServer(service, PART, LampState().operations()):
            with origin.acting("rest", "10.0.0.7") as begun:
                await ask(ann, "read.state")
                answered = [begun.answered]
                await ask(ann, "request.switch", {"name": "hall"})
                answered.append(begun.answered)
            await ask(ann, "request.switch", {"name": "hall"})
        assert answered == [False, True]
        first, second = await decisions(service)
        assert first.details == {"interface": "rest", "address": "10.0.0.7"}
        assert second.details == {}

    async def test_lists_have_pages_and_an_oversize_result_is_an_error(self, connect):
        service, ann = await connect("service"), await connect("ann")
        async with server.RpcServer(service, PART, LampState().operations()):
            rows = [row async for row in client.pages(ann, subjects.from_identity(PART, "ann", "read.rows"))]
            assert rows == [f"{n:05}" for n in range(6000)]
            with pytest.raises(errors.LimitExceeded, match="more than a message holds") as caught:
                await ask(ann, "read.long", {"size": 2 << 20})
            assert "pages" in (caught.value.hint or "")

    async def test_too_many_requests_are_refused_as_overload(self, connect):
        service, ann, bob, cleo = [await connect(name) for name in ("service", "ann", "bob", "cleo")]
        lamp = LampState()
        async with server.RpcServer(service, PART, lamp.operations(), pending_max=4) as serving:

            def begin(bus: api.Bus, count: int) -> list[asyncio.Future[Any]]:
                return [
                    asyncio.ensure_future(ask(bus, "request.wait", {"name": str(n)})) for n in range(count)
                ]

            waiting = begin(ann, 2)
            await eventually(lambda: serving.pending == 2)
            with pytest.raises(errors.Overloaded):
                await ask(ann, "read.state")
            assert await ask(bob, "read.state") == [], "one client locked out another"
            waiting += begin(bob, 2)
            await eventually(lambda: serving.pending == 4)
            with pytest.raises(errors.Overloaded):
                await ask(cleo, "read.state")
            lamp.go_on.set()
            await asyncio.gather(*waiting)
            assert len(await ask(ann, "read.state")) == 4

    async def test_large_pending_requests_are_refused_as_overload(self, connect, monkeypatch):
        monkeypatch.setattr(admission, "PENDING_BYTES_MAX", 5_000)
        service, ann, bob = [await connect(name) for name in ("service", "ann", "bob")]
        lamp, large = LampState(), {"name": "n" * 1_000}
        async with server.RpcServer(service, PART, lamp.operations()) as serving:
            waiting = [asyncio.ensure_future(ask(ann, "request.wait", large)) for _ in range(2)]
            await eventually(lambda: serving.pending == 2)
            with pytest.raises(errors.Overloaded):
                await ask(ann, "request.switch", large)
            with pytest.raises(errors.Unavailable, match="too many requests"):  # answered once a second
                await ask(ann, "request.switch", {"name": "n"}, on_behalf_of="n" * 1_000)
            assert len(await ask(ann, "read.state")) == 0
            assert (await ask(bob, "request.switch", large))["on"] == 1
            lamp.go_on.set()
            await asyncio.gather(*waiting)
            assert (await ask(ann, "request.switch", large))["on"] == 4

    async def test_a_flood_is_refused_without_a_task_and_delays_no_other_client(self, connect):
        service, ann, bob = [await connect(name) for name in ("service", "ann", "bob")]
        lamp, decoded = LampState(), []
        taken: list[str] = []

        def decode(data: bytes) -> bytes:
            decoded.append(data)
            raise errors.InvalidInput("not a request")

        operations = [*lamp.operations(), server.RpcOperation("read.odd", lamp.switch, decode=decode)]
        admission.of_loop(asyncio.get_running_loop()).share = 0.01
        async with server.RpcServer(service, PART, operations, on_outcome=taken.append) as serving:
            replies = await ann.subscribe("_R.@manage.ann.>")
            for number in range(500):
                odd = subjects.from_identity(PART, "ann", "read.odd")
                await ann.publish(odd, b"{", reply=f"_R.@manage.ann.{number}.1")
            await eventually(lambda: len(taken) == 500)
            assert len(decoded) <= 100, "the others are refused before they are decoded"
            assert serving.refused["rate"] == 500 - len(decoded)
            assert await ask(bob, "read.state") == [], "another client is served"
            answers = [await replies.next(timeout_s=5) for _ in range(len(decoded) + 1)]
            overloaded = [answer for answer in answers if b"throttled" in answer.data]
            assert len(overloaded) == 1, "refusals of an identity are answered once a second"
            assert b'"retry_after_s":1.0' in overloaded[0].data

    async def test_the_requests_of_one_identity_are_executed_some_at_once_and_in_order(self, connect):
        service, ann, bob = [await connect(name) for name in ("service", "ann", "bob")]
        lamp, most = LampState(), [0, 0]

        async def wait(call: server.RpcCall, name: str) -> str:
            most[0] += 1
            most[1] = max(most)
            await lamp.go_on.wait()
            lamp.on.append(name)
            most[0] -= 1
            return name

        operations = [server.RpcOperation("read.wait", wait), server.RpcOperation("read.state", lamp.state)]
        async with server.RpcServer(service, PART, operations, each_at_once=2) as serving:
            names = [f"{number}" for number in range(6)]
            waiting = [asyncio.ensure_future(ask(ann, "read.wait", {"name": name})) for name in names]
            await eventually(lambda: serving.pending == 6)
            assert await ask(bob, "read.state") == []
            lamp.go_on.set()
            assert await asyncio.gather(*waiting) == names
            assert (most[1], lamp.on, serving.pending) == (2, names, 0)

    async def test_a_repetition_of_a_pending_request_is_not_refused_as_overload(self, connect):
        service, ann = await connect("service"), await connect("ann")
        lamp = LampState()
        async with server.RpcServer(service, PART, lamp.operations(), pending_max=2) as serving:
            waiting = asyncio.ensure_future(ask(ann, "request.wait", {"name": "a"}, try_s=0.05))
            await lamp.begun.wait()
            await eventually(lambda: serving.refused["repeated"] > 0)
            lamp.go_on.set()
            assert await waiting == 1, "it was executed, so it must not be reported as refused"

    async def test_a_message_with_a_reply_elsewhere_is_no_request(self, connect):
        service, ann = await connect("service"), await connect("ann")
        lamp = LampState()
        async with server.RpcServer(service, PART, lamp.operations()) as serving:
            subscription = await service.subscribe("muster.>")
            subject = subjects.from_identity(PART, "ann", "request.switch")
            data = b'{"name": "a"}'
            for reply in (
                None,
                "muster.manage.to.x.command",
                "_R.@manage.eve.s.1",
                "_R.app.ann.s.1",
                "_INBOX.ann.1",
            ):
                await ann.publish(subject, data, reply=reply)
            await eventually(lambda: sum(serving.refused.values()) == 5)
            assert serving.refused == {"reply": 5}
            assert not lamp.on
            assert subscription.statistics().pending == 5

    async def test_a_request_waits_for_a_server_and_reports_an_unknown_outcome(self, connect):
        service, ann = await connect("service"), await connect("ann")
        with pytest.raises(errors.NotConnected):
            await ask(ann, "read.state", waits=False, absent=errors.NotConnected("no lamp"))
        waiting = asyncio.ensure_future(ask(ann, "request.switch", {"name": "a"}, timeout_s=30))
        lamp, quiet = LampState(), [True]
        async with server.RpcServer(service, PART, lamp.operations(), serving=lambda: not quiet[0]):
            with pytest.raises(errors.TimedOut, match="it may have been done"):
                await ask(ann, "request.switch", {"name": "b"}, timeout_s=0.2, try_s=0.1)
            quiet[0] = False
            again = await ask(ann, "request.switch", {"name": "c"}, try_s=0.5)
            assert again["on"] >= 1
        waiting.cancel()

    @pytest.mark.parametrize("kind", ["request", "read"])
    async def test_a_server_that_loses_its_role_leaves_a_request_to_the_next(self, connect, kind):
        service, ann = await connect("service"), await connect("ann")
        is_serving, attempts = [True], []

        async def switch(call: server.RpcCall) -> int:
            attempts.append(call)
            if len(attempts) == 1:
                is_serving[0] = False
                asyncio.get_running_loop().call_soon(is_serving.__setitem__, 0, True)
                raise errors.Unavailable("this server is not active")
            return len(attempts)

        operation = server.RpcOperation(f"{kind}.switch", switch, audited=False)
        async with server.RpcServer(service, PART, [operation], serving=lambda: is_serving[0]):
            assert await ask(ann, f"{kind}.switch", try_s=0.1) == 2

    async def test_a_repetition_that_another_server_refuses_is_in_doubt(self, connect):
        service, ann = await connect("service"), await connect("ann")
        attempts: list[api.Message] = []
        refusal = server.JsonCodec().error(errors.Overloaded("too many requests are under way"))

        async def serve(message: api.Message) -> None:
            attempts.append(message)
            if len(attempts) > 1:
                await message.respond(refusal)

        await service.subscribe(subjects.from_identity(PART, "ann", "request.switch"), handler=serve)
        with pytest.raises(errors.TimedOut, match="it may have been done"):
            await ask(ann, "request.switch", {"name": "a"}, timeout_s=30, try_s=0.1)

    async def test_a_throttled_repetition_is_sent_again_with_the_same_id(self, connect):
        service, ann = await connect("service"), await connect("ann")
        ids: list[str | None] = []

        async def serve(message: api.Message) -> None:
            ids.append(message.header(requests.REQUEST_ID))
            refusal = server.JsonCodec().error(errors.Throttled("too much", retry_after_s=0.1))
            if len(ids) > 1:  # the first one is refused without a reply
                await message.respond(refusal if len(ids) == 2 else server.JsonCodec().result("done"))

        await service.subscribe(subjects.from_identity(PART, "ann", "request.switch"), handler=serve)
        assert await ask(ann, "request.switch", {"name": "a"}, timeout_s=30, try_s=0.1) == "done"
        assert len(set(ids)) == 1

    async def test_a_refused_message_without_a_reply_subject_is_dropped(self, connect):
        service, ann = await connect("service"), await connect("ann")
        core, admitted = admission.of_loop(asyncio.get_running_loop()), []
        core.share = 0.001
        async with server.RpcServer(service, PART, []) as serving:
            serving.charge("ann", 100.0)
            subscription = await service.subscribe(
                "s", handler=lambda message: admitted.append(serving.admit("ann", message))
            )
            await ann.publish("s", b"")
            await eventually(lambda: admitted == [False] or subscription.statistics().failed)
            assert admitted == [False]
            assert core.may_answer("ann", asyncio.get_running_loop().time()), "a request may be answered"

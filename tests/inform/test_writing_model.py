"""Random writes, repetitions and faults against a naive model: the log has each request once.

The machine drives real nodes over the simulated network in virtual time.  Rules begin writes and let some
time pass, so that writes, repeats, lost answers, late messages, crashes and clock steps interleave.  At the
end all faults are healed, and a plain replay of the log judges the records and every answer.

The defect this model exists for: a write is stored, its answer is lost, another client writes, and the first
write is repeated.  Each of these is one step, and all of them together are another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from typing import Any

import hypothesis
import msgspec
from hypothesis import stateful
from hypothesis import strategies as st

from muster.bus.log import pages
from muster.bus.memory import connection, network
from muster.core import errors
from muster.inform import client, protocol, settings
from muster.inform.node import node as node_node
from muster.inform.node.log import context_log, page_order
from muster.testing import virtual_clock

SETTINGS = msgspec.structs.replace(settings.DEFAULT, timeout_s=1.0, replicas=2, history=1_000)
HOUR_NS = 3_600_000_000_000

NODES = st.sampled_from(["p", "q", "r"])
KEYS = st.sampled_from(["k", "absent"])  # written at the start, and not written yet
CLIENTS = st.sampled_from(["alice", "bob"])
WRITES = st.sampled_from(["put", "delete"])
EXPECTED = st.sampled_from(["anything", "current", "absent", "older"])
STORED_S = 0.1  # more than a write takes that meets no fault


class Network(network.SimulatedNetwork):
    """With answers that are lost on their way, and nodes that get their messages late."""

    def __init__(self) -> None:
        super().__init__(seed=1)
        self.mute: set[tuple[str, str]] = set()  # responder, requester
        self.late: dict[str, list[Any]] = {}

    def route(self, node: str, subject: str, *rest: Any) -> int:
        is_answer = subject.startswith("_")
        if is_answer and any(
            node == responder != requester and f".{requester}." in subject
            for responder, requester in self.mute
        ):
            return 1
        return super().route(node, subject, *rest)

    def _pass_on(self, ear: connection.SimulatedSubscription, message: connection.SimulatedMessage) -> None:
        if ear.bus.node in self.late:
            self.late[ear.bus.node].append((ear, message))
        else:
            super()._pass_on(ear, message)

    def release(self) -> None:
        late, self.late = self.late, {}
        for messages in late.values():
            for ear, message in messages:
                self._pass_on(ear, message)


Answer = protocol.WriteResult | errors.MusterError


@dataclasses.dataclass
class WriteAttempt:
    request: protocol.PutContext | protocol.DeleteContext
    writer: str
    begun_at_s: float
    answers: list[tuple[float, protocol.WriteResult | errors.MusterError]] = dataclasses.field(
        default_factory=list
    )
    tasks: list[asyncio.Task[None]] = dataclasses.field(default_factory=list)


class WriteModel(stateful.RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = virtual_clock.VirtualLoop()
        asyncio.set_event_loop(self.loop)
        self.net = Network()
        self.clock_ns = dict.fromkeys("pqr", 0)
        self.nodes: dict[str, node_node.InformationNode] = {}
        self.buses: dict[str, connection.SimulatedBus] = {}
        self.operations: list[WriteAttempt] = []
        self.moves: list[asyncio.Task[None]] = []
        self.run(self._start())

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    async def _start(self) -> None:
        for name in "pqr":
            await self._serve(name)
        for name in ("alice", "bob"):
            self.buses[name] = await self.net.connect(name)
        for node in self.nodes.values():
            await node.maintenance.discover()
        await asyncio.sleep(0.1)
        self._begin("alice", "p", "k", "put", "anything")  # p is the primary
        await asyncio.sleep(0.1)

    async def _serve(self, name: str) -> None:
        self.buses[name] = await self.net.connect(name)
        self.nodes[name] = await node_node.start(
            self.buses[name], settings=SETTINGS, now_ns=lambda: self.net.now_ns() + self.clock_ns[name]
        )

    # -- writes ----------------------------------------------------------------------------------------------

    unanswered: stateful.Bundle[WriteAttempt] = stateful.Bundle("unanswered")

    @stateful.rule(
        writer=CLIENTS,
        via=NODES,
        key=KEYS,
        kind=WRITES,
        expected=EXPECTED,
        wait_s=st.sampled_from([0.0, 0.003, STORED_S]),
    )
    def write(self, writer: str, via: str, key: str, kind: str, expected: str, wait_s: float) -> None:
        self._begin(writer, via, key, kind, expected)
        self.run(asyncio.sleep(wait_s))

    @stateful.rule(
        target=unanswered,
        writer=CLIENTS,
        via=NODES,
        key=KEYS,
        kind=WRITES,
        expected=EXPECTED,
        is_client=st.booleans(),
    )
    def lose_answer(
        self, writer: str, via: str, key: str, kind: str, expected: str, is_client: bool
    ) -> WriteAttempt:
        """A write whose answer is lost: on its way to the client, or from the primary to its node."""
        return self._lose_answer(writer, via, key, kind, expected, is_client)

    @stateful.rule(operation=unanswered, via=NODES)
    def repeat(self, operation: WriteAttempt, via: str) -> None:
        """As by a client that got no reply, and repeats the request to another node or the same."""
        self._repeat(operation, via)

    @stateful.rule(writer=CLIENTS, via=NODES, again=NODES, key=KEYS, kind=WRITES, is_client=st.booleans())
    def repeat_after_another(
        self, writer: str, via: str, again: str, key: str, kind: str, is_client: bool
    ) -> None:
        operation = self._lose_answer(writer, via, key, kind, "anything", is_client)
        self._begin("bob" if writer == "alice" else "alice", again, key, "put", "anything")
        self.run(asyncio.sleep(STORED_S))
        self._repeat(operation, again)

    def _lose_answer(
        self, writer: str, via: str, key: str, kind: str, expected: str, is_client: bool
    ) -> WriteAttempt:
        self.net.mute.update([(via, writer)] if is_client else [(node, via) for node in self.nodes])
        operation = self._begin(writer, via, key, kind, expected)
        self.run(asyncio.sleep(STORED_S))
        return operation

    def _repeat(self, operation: WriteAttempt, via: str) -> None:
        if operation.answers:
            return
        for task in operation.tasks:
            task.cancel()  # the client no longer waits for an answer to an earlier attempt
        self.net.mute.discard((via, operation.writer))
        self._send(operation, via, msgspec.structs.replace(operation.request, repeat=True))
        self.run(asyncio.sleep(STORED_S))

    def _begin(self, writer: str, via: str, key: str, kind: str, expected: str) -> WriteAttempt:
        number = len(self.operations)
        version = self._expected(key, expected)
        context: protocol.PutContext | protocol.DeleteContext
        if kind == "delete":
            context = protocol.DeleteContext(key, version, f"r{number}")
        else:
            context = protocol.PutContext(key, b"%d" % number, {}, 0.0, version, "logged", f"r{number}")
        operation = WriteAttempt(context, writer, self.loop.time())
        self.operations.append(operation)
        self._send(operation, via, context)
        return operation

    def _expected(self, key: str, expected: str) -> int | None:
        entries = self._states(key)
        match expected:
            case "current" if entries and entries[-1].record.value is not None:
                return entries[-1].version
            case "current" | "absent":
                return 0
            case "older":
                return entries[0].version if entries else 1
        return None

    def _send(
        self, operation: WriteAttempt, via: str, context: protocol.PutContext | protocol.DeleteContext
    ) -> None:
        contexts = client.InformClient(self.buses[operation.writer], node=via, timeout_s=12.0)

        async def send() -> None:
            try:
                answer: Answer = await contexts.write(context)
            except errors.MusterError as error:
                answer = error
            operation.answers.append((self.loop.time(), answer))

        operation.tasks.append(self.loop.create_task(send()))

    # -- time and faults -------------------------------------------------------------------------------------

    @stateful.rule(seconds=st.sampled_from([0.0, 0.001, 0.003, 0.1, 1.1, 4.0]))
    def wait(self, seconds: float) -> None:
        self.run(asyncio.sleep(seconds))

    @stateful.rule(node=NODES)
    def delay_messages(self, node: str) -> None:
        self.net.late.setdefault(node, [])

    @stateful.rule()
    def heal(self) -> None:
        self.net.mute.clear()
        self.run(self._release())

    async def _release(self) -> None:
        self.net.release()

    @stateful.rule(node=NODES, kill=st.booleans())
    def restart(self, node: str, kill: bool) -> None:
        """A kill loses what it was doing; a stop cancels what it cannot finish."""

        async def again() -> None:
            if kill:
                self.net.crash(self.buses[node])
            await self.nodes[node].close()
            if not kill:
                await self.buses[node].close()
            await self._serve(node)

        self.run(again())

    @stateful.rule(node=NODES, hours=st.sampled_from([-1, 1]))
    def step_clock(self, node: str, hours: int) -> None:
        self.clock_ns[node] += hours * HOUR_NS

    @stateful.rule(key=KEYS, to=NODES)
    def move_primary(self, key: str, to: str) -> None:
        async def move(node: node_node.InformationNode, holders: tuple[str, ...]) -> None:
            with contextlib.suppress(errors.Unavailable):
                moved = (to, *(holder for holder in holders if holder != to))[:2]
                await node.primary.place(key, moved, before=holders)

        for node in self.nodes.values():
            copy = node.replicas.index.get(key)
            if copy is not None and copy.holders[0] == node.name != to:
                self.moves.append(self.loop.create_task(move(node, copy.holders)))

    # -- judgement -------------------------------------------------------------------------------------------

    def _entries(self, key: str) -> list[context_log.ContextLogEntry]:
        """The records of a key that count."""
        order, entries = page_order.PageOrder(), []
        for message in self.net.logs[protocol.STREAM].messages.values():
            page = protocol.decode(message.data, protocol.ContextLogPage)
            for place, counts in enumerate(
                order.add(message.sequence, page, protocol.node_of(message.subject))
            ):
                if counts and page.records[place].key == key:
                    position = pages.position(message.sequence, place)
                    entries.append(context_log.ContextLogEntry(page.records[place], position))
        return entries

    def _states(self, key: str) -> list[context_log.ContextLogEntry]:
        return [entry for entry in self._entries(key) if entry.record.reason != "refuse"]

    def teardown(self) -> None:
        try:
            self.heal()
            self.run(asyncio.sleep(15.0))
            self._check_answers(self._replay("k") | self._replay("absent"))
            self.run(self._check_reads())
        finally:
            self.run(self._close())
            asyncio.set_event_loop(None)
            self.loop.close()

    def _replay(self, key: str) -> dict[int, int]:
        """The versions of the operations that were stored, each at a moment when it was possible."""
        version, live = 0, False
        stored: dict[int, int] = {}
        refused: set[int] = set()
        for entry in self._entries(key):
            record = entry.record
            if record.reason == "refuse":
                refused.add(int(record.request[1:]))
                continue
            if record.reason == "place":
                assert entry.version == version, "a move changes nothing"
                continue
            number = int(record.request[1:])
            operation = self.operations[number]
            request = operation.request
            assert number not in stored, f"{request} was carried out twice"
            assert number not in refused, f"{request} was carried out after it was refused"
            assert record.writer == operation.writer
            assert record.value == (request.value if isinstance(request, protocol.PutContext) else None)
            assert live or isinstance(request, protocol.PutContext), "nothing was there to be deleted"
            assert request.expected_version in (None, version if live else 0)
            version, live = entry.position, record.value is not None
            stored[number] = version
        return stored

    def _check_answers(self, stored: dict[int, int]) -> None:
        acknowledged: list[tuple[float, int]] = []
        for number, operation in enumerate(self.operations):
            for at_s, answer in operation.answers:
                if isinstance(answer, protocol.WriteResult):
                    assert stored.get(number) == answer.version, f"acknowledged as {answer}, and not stored"
                    acknowledged.append((at_s, answer.version))
                elif not isinstance(answer, errors.TimedOut):
                    assert number not in stored, f"stored, and refused: {answer!r}"
        for number, operation in enumerate(self.operations):
            for at_s, version in acknowledged:
                if number in stored and at_s < operation.begun_at_s:
                    assert version < stored[number], "begun after another was acknowledged, stored before it"

    async def _check_reads(self) -> None:
        for name, key in itertools.product(self.nodes, ("k", "absent")):
            contexts = client.InformClient(self.buses["alice"], node=name)
            try:
                value = (await contexts.get(key, max_staleness_s=0.0)).value
            except errors.NotFound:
                value = None
            entries = self._states(key)
            assert value == (entries[-1].record.value if entries else None)

    async def _close(self) -> None:
        sends = [task for operation in self.operations for task in operation.tasks]
        for task in (*sends, *self.moves):
            task.cancel()
        await asyncio.gather(*sends, *self.moves, return_exceptions=True)
        for node in self.nodes.values():
            await node.close()
        for bus in self.buses.values():
            await bus.close()
        await asyncio.sleep(1.0)


WriteModel.TestCase.settings = hypothesis.settings(
    max_examples=40,
    stateful_step_count=12,
    deadline=None,
    phases=(hypothesis.Phase.generate,),  # shrinking takes minutes; twelve steps can be read as they are
)
test_writes_and_answers_agree_with_the_log = WriteModel.TestCase

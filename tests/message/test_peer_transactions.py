"""The requests of a transaction of several partitions, one by one, to the dispatcher of one partition."""

from __future__ import annotations

import asyncio
import contextlib
import types
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from muster.bus import api as bus_api
from muster.bus.memory import network, streams
from muster.core import errors
from muster.message import destinations, partitions, protocol, settings
from muster.message import errors as message_errors
from muster.message.client import api, consumers
from muster.message.dispatcher import dispatcher
from muster.message.dispatcher.log import journal, ledger, pages
from muster.message.dispatcher.peers import peer_protocol, transactions
from muster.testing import eventually, virtual_clock

pytestmark = pytest.mark.virtual_time

COUNT = 2
HERE = 1
QUEUE = next(
    queue
    for queue in (destinations.queue(f"jobs-{number}") for number in range(99))
    if partitions.of_destination(queue, COUNT) == HERE
)
KEY = ledger.queue_key(QUEUE.name)
ATTEMPT = "client-1/7/first"


@pytest.fixture(autouse=True)
def wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes with the loop."""
    monkeypatch.setattr("time.time_ns", virtual_clock.FakeClock().time_ns)


@dataclass
class PeerPartition:
    """A dispatcher of partition `HERE` and a peer of it."""

    net: network.SimulatedNetwork
    stream: bus_api.Stream
    peer: bus_api.Bus

    async def call(self, request: peer_protocol.PeerRequest) -> protocol.DispatcherReply:
        return await peer_protocol.call(self.peer, HERE, request)

    async def is_served(self) -> bool:
        try:
            await self.call(peer_protocol.CheckDestination(str(QUEUE)))
        except errors.Unavailable:
            return False
        return True

    async def outcome(self, attempt: str = ATTEMPT) -> int:
        return (await self.call(peer_protocol.AskOutcome(attempt))).count

    async def write(self, **fields: Any) -> None:
        """Write to the log as another owner does."""
        page = pages.MessagePage(record=ledger.LogRecord(**fields))
        await self.stream.publish(partitions.LogSubjects(HERE).record, pages.encode(page))

    async def records(self) -> list[ledger.LogRecord]:
        return [
            record async for page in self.stream.read(1) if (record := pages.cover(page).record) is not None
        ]

    @contextlib.asynccontextmanager
    async def client(self, identity: str = "client") -> AsyncIterator[api.Connection]:
        async with api.Connection(await self.net.connect(identity)) as connection:
            connection.set_partition_count(COUNT)
            yield connection


@contextlib.asynccontextmanager
async def serving(net: network.SimulatedNetwork, *, epoch: int = 1) -> AsyncIterator[PeerPartition]:
    """Without a lease: the owner of the log changes only when another one writes to it."""
    bus = await net.connect(f"dispatcher-{epoch}")
    stream = await bus.stream(
        bus_api.StreamSettings(partitions.stream(HERE), partitions.LogSubjects(HERE).all, max_age_s=0)
    )
    running = asyncio.ensure_future(
        dispatcher.Dispatcher(
            bus, stream, epoch, settings.MessageSettings(), partition=HERE, partition_count=COUNT
        ).run()
    )
    try:
        partition = PeerPartition(net, stream, await net.connect(f"peer-{epoch}"))
        await eventually.eventually(partition.is_served)
        yield partition
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def held(connection: api.Connection, count: int = 1) -> tuple[consumers.Consumer, list[int]]:
    """A consumer that holds messages, and the numbers of these."""
    for number in range(count):
        await connection.session().producer(QUEUE).send(f"{number}")
    session = connection.session(api.AcknowledgeMode.TRANSACTED)
    consumer = await session.consumer(QUEUE)
    for _ in range(count):
        assert await consumer.receive(5)
    return consumer, [delivery.sequence for delivery in session.unacknowledged.values()]


def prepare(
    client: api.Connection, numbers: list[int], attempt: str = ATTEMPT, **changes: str
) -> peer_protocol.PrepareAcks:
    fields = {"connection": client.name, "identity": client.bus.identity, **changes}
    return peer_protocol.PrepareAcks(attempt, 0, acks={KEY: numbers}, **fields)


async def received_by_another(partition: PeerPartition) -> list[tuple[str, bool]]:
    """What another client receives, and whether it is marked as redelivered."""
    async with partition.client("other") as connection, connection.session() as session:
        consumer = await session.consumer(QUEUE)
        messages = []
        while (message := await consumer.receive(1)) is not None:
            messages.append((str(message.body()), message.redelivered))
        return messages


async def test_a_former_coordinator_does_not_state_that_an_attempt_has_failed(
    simulated_network: network.SimulatedNetwork,
):
    """Its successor may have decided to commit: it does not know."""
    async with serving(simulated_network) as partition:
        assert await partition.outcome("unknown") == peer_protocol.Outcome.ABORTED
        await partition.write(decided={ATTEMPT: [0]})
        with pytest.raises(errors.MusterError):
            await partition.outcome()
    async with serving(simulated_network, epoch=2) as partition:
        assert await partition.outcome() == peer_protocol.Outcome.COMMITTED


async def test_a_former_owner_does_not_confirm_that_acknowledgements_are_resolved(
    simulated_network: network.SimulatedNetwork,
):
    """Its successor may have prepared them, and then the coordinator must not forget its decision."""
    async with serving(simulated_network) as partition:
        await partition.call(peer_protocol.ResolveAcks("unknown", commit=True))
        prepared = ledger.PreparedAcks(ATTEMPT, 0, "client-1", {KEY: [5 << pages.BITS]})
        await partition.write(prepared=[prepared])
        with pytest.raises(errors.MusterError):
            await partition.call(peer_protocol.ResolveAcks(ATTEMPT, commit=True))
    async with serving(simulated_network, epoch=2) as partition:
        await partition.call(peer_protocol.ResolveAcks(ATTEMPT, commit=True))
        assert (await partition.records())[-1].acked == {KEY: [5 << pages.BITS]}


async def test_messages_that_are_prepared_wait_for_the_decision(
    simulated_network: network.SimulatedNetwork,
):
    async with serving(simulated_network) as partition, partition.client() as connection:
        consumer, numbers = await held(connection, 2)
        await partition.call(prepare(connection, numbers[:1]))
        with pytest.raises(message_errors.TransactionRolledBack):
            await partition.call(prepare(connection, numbers[:1], "another/1/x"))
        await consumer.close()
        await connection.close()
        assert await received_by_another(partition) == [("1", True)]
        await partition.call(peer_protocol.ResolveAcks(ATTEMPT, commit=False))
        assert await received_by_another(partition) == [("0", True)]


async def test_a_consumer_that_waits_receives_what_is_released(simulated_network: network.SimulatedNetwork):
    async with (
        serving(simulated_network) as partition,
        partition.client() as connection,
        partition.client("other") as another,
    ):
        _, numbers = await held(connection)
        await partition.call(prepare(connection, numbers))
        await connection.close()
        consumer = await another.session().consumer(QUEUE)
        assert await consumer.receive(1) is None
        await partition.call(peer_protocol.ResolveAcks(ATTEMPT, commit=False))
        message = await consumer.receive(1)
        assert message is not None
        assert message.redelivered


async def test_what_is_committed_is_done(simulated_network: network.SimulatedNetwork):
    async with serving(simulated_network) as partition, partition.client() as connection:
        _, numbers = await held(connection)
        await partition.call(prepare(connection, numbers))
        for _ in range(2):  # it may be repeated
            await partition.call(peer_protocol.ResolveAcks(ATTEMPT, commit=True))
        await connection.close()
        assert await received_by_another(partition) == []


async def test_only_the_client_that_received_messages_prepares_them(
    simulated_network: network.SimulatedNetwork,
):
    async with serving(simulated_network) as partition, partition.client() as connection:
        _, numbers = await held(connection)
        with pytest.raises(errors.NotConnected):
            await partition.call(prepare(connection, numbers, connection="client-unknown"))
        with pytest.raises(errors.NotConnected):
            await partition.call(prepare(connection, numbers, identity="thief"))
        await partition.call(prepare(connection, numbers))


class SlowWrites:
    """Writes to the log wait for ``may_store``."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.may_store = asyncio.Event()
        self.error: errors.MusterError | None = None
        plain = streams.SimulatedStream.publish_batch

        async def store(stream: streams.SimulatedStream, *arguments: Any, **options: Any) -> int:
            await self.may_store.wait()
            if self.error is not None:
                raise self.error
            return await plain(stream, *arguments, **options)

        patch.setattr(streams.SimulatedStream, "publish_batch", store)


async def test_an_attempt_that_is_aborted_while_it_is_prepared_releases_its_messages(
    simulated_network: network.SimulatedNetwork, monkeypatch: pytest.MonkeyPatch
):
    async with serving(simulated_network) as partition, partition.client() as connection:
        _, numbers = await held(connection)
        disk = SlowWrites(monkeypatch)
        preparing = asyncio.ensure_future(partition.call(prepare(connection, numbers)))
        await asyncio.sleep(0.1)
        aborting = asyncio.ensure_future(partition.call(peer_protocol.ResolveAcks(ATTEMPT, commit=False)))
        await asyncio.sleep(0.1)
        disk.may_store.set()
        await asyncio.gather(aborting, preparing)
        await connection.close()
        assert await received_by_another(partition) == [("0", True)]


async def test_messages_that_cannot_be_prepared_for_lack_of_room_are_released(
    simulated_network: network.SimulatedNetwork, monkeypatch: pytest.MonkeyPatch
):
    async with serving(simulated_network) as partition, partition.client() as connection:
        _, numbers = await held(connection)
        disk = SlowWrites(monkeypatch)
        disk.error = errors.LimitExceeded("insufficient storage")
        disk.may_store.set()
        with pytest.raises(errors.LimitExceeded):
            await partition.call(prepare(connection, numbers))
        disk.error = None
        await connection.close()
        assert await received_by_another(partition) == [("0", True)]


async def test_a_repeated_resolution_waits_for_the_first(
    simulated_network: network.SimulatedNetwork, monkeypatch: pytest.MonkeyPatch
):
    """Otherwise the second would confirm what is not stored."""
    async with serving(simulated_network) as partition, partition.client() as connection:
        _, numbers = await held(connection)
        await partition.call(prepare(connection, numbers))
        disk = SlowWrites(monkeypatch)
        request = peer_protocol.ResolveAcks(ATTEMPT, commit=True)
        both = [asyncio.ensure_future(partition.call(request)) for _ in range(2)]
        await asyncio.sleep(0.1)
        assert not any(call.done() for call in both)
        disk.may_store.set()
        await asyncio.gather(*both)
        assert [record.resolved for record in await partition.records()].count([ATTEMPT]) == 1


class Coordinator:
    """Answers questions for the outcome, in place of partition 0."""

    def __init__(self, partition: PeerPartition) -> None:
        self.outcomes: dict[str, peer_protocol.Outcome] = {}
        self.asked: list[str] = []
        self._partition = partition

    async def start(self) -> None:
        self._bus = await self._partition.net.connect("coordinator")
        await self._bus.subscribe(peer_protocol.peer_subject("*", 0), handler=self._answer)

    async def _answer(self, message: bus_api.Message) -> None:
        request = peer_protocol.decode_request(message.data)
        assert isinstance(request, peer_protocol.AskOutcome)
        self.asked.append(request.attempt)
        outcome = self.outcomes.get(request.attempt, peer_protocol.Outcome.ABORTED)
        assert message.reply is not None
        await self._bus.publish(message.reply, protocol.encode(protocol.DispatcherReply(count=outcome)))


async def test_a_partition_asks_for_a_decision_that_does_not_arrive(
    simulated_network: network.SimulatedNetwork,
):
    async with serving(simulated_network) as partition, partition.client() as connection:
        coordinator = Coordinator(partition)
        await coordinator.start()
        _, numbers = await held(connection, 2)
        coordinator.outcomes[ATTEMPT] = peer_protocol.Outcome.UNDECIDED
        await partition.call(prepare(connection, numbers[:1]))
        await partition.call(prepare(connection, numbers[1:], "client-1/8/x"))
        assert not coordinator.asked, "the decision may be under way"
        await asyncio.sleep(2.5 * transactions.ASK_S)
        assert coordinator.asked.count("client-1/8/x") == 1
        assert coordinator.asked.count(ATTEMPT) >= 1
        coordinator.outcomes[ATTEMPT] = peer_protocol.Outcome.COMMITTED
        await asyncio.sleep(2 * transactions.ASK_S)
        await connection.close()
        assert await received_by_another(partition) == [("1", True)]


async def test_a_successor_asks_at_once_and_reserves_what_is_prepared(
    simulated_network: network.SimulatedNetwork,
):
    async with serving(simulated_network) as partition, partition.client() as connection:
        _, numbers = await held(connection)
        await partition.call(prepare(connection, numbers))
        await connection.close()
    async with serving(simulated_network, epoch=2) as partition:
        assert await received_by_another(partition) == []
        coordinator = Coordinator(partition)
        await coordinator.start()
        await asyncio.sleep(2 * transactions.ASK_S)
        assert coordinator.asked == [ATTEMPT]
        assert await received_by_another(partition) == [("0", True)]


async def test_a_new_attempt_waits_until_an_earlier_one_of_the_same_transaction_is_resolved(
    simulated_network: network.SimulatedNetwork,
):
    async with serving(simulated_network) as partition, partition.client() as connection:
        coordinator = Coordinator(partition)
        await coordinator.start()
        _, numbers = await held(connection)
        coordinator.outcomes[ATTEMPT] = peer_protocol.Outcome.UNDECIDED
        await partition.call(prepare(connection, numbers))
        with pytest.raises(errors.Unavailable):
            await partition.call(prepare(connection, numbers, "client-1/7/second"))
        del coordinator.outcomes[ATTEMPT]
        await partition.call(prepare(connection, numbers, "client-1/7/second"))
        await partition.call(peer_protocol.ResolveAcks(ATTEMPT, commit=True))  # late: no effect
        assert all(not record.acked for record in await partition.records())
        await partition.call(peer_protocol.ResolveAcks("client-1/7/second", commit=True))
        assert (await partition.records())[-1].acked == {KEY: numbers}


# The coordinator, without a dispatcher around it.


class Coordinated:
    """The transactions of partition 0, and what they store and request."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.stored: list[ledger.LogRecord] = []
        self.requests: list[tuple[int, peer_protocol.PeerRequest]] = []
        self.slow_s: dict[int, float] = {}  # by partition
        self.failing: dict[int, list[errors.MusterError]] = {}
        self.full = 0  # how many attempts to store fail
        self.decided: dict[str, list[int]] = {}
        self.spawned: set[asyncio.Task[None]] = set()
        patch.setattr(peer_protocol, "call", self._call)
        log: Any = types.SimpleNamespace(
            ledger=types.SimpleNamespace(decided=self.decided),
            partition=0,
            partition_count=COUNT,
            store=self._store,
        )
        lifetime: Any = types.SimpleNamespace(
            spawn=lambda work: self.spawned.add(asyncio.ensure_future(work))
        )
        unused: Any = None
        self.transactions = transactions.Transactions(unused, log, lifetime, unused, unused, unused)

    async def _call(self, _: Any, partition: int, request: peer_protocol.PeerRequest) -> None:
        self.requests.append((partition, request))
        await asyncio.sleep(self.slow_s.get(partition, 0.0))
        if self.failing.get(partition):
            raise self.failing[partition].pop()
        self.slow_s.pop(partition, None)

    async def _store(self, item: journal.JournalItem) -> None:
        if self.full:
            self.full -= 1
            raise errors.LimitExceeded("the log is full")
        assert item.record is not None
        self.stored.append(item.record)
        for attempt in item.record.completed:
            self.decided.pop(attempt, None)

    async def outcome(self, attempt: transactions.Attempt) -> int:
        return (await self.transactions.outcome(attempt.name)).count


@pytest.fixture
def coordinated(monkeypatch: pytest.MonkeyPatch) -> Coordinated:
    return Coordinated(monkeypatch)


async def test_an_attempt_is_undecided_until_it_is_aborted(coordinated: Coordinated):
    attempt = coordinated.transactions.begin("client-1", 7, [1, 2])
    assert await coordinated.outcome(attempt) == peer_protocol.Outcome.UNDECIDED
    coordinated.transactions.abort(attempt)
    assert await coordinated.outcome(attempt) == peer_protocol.Outcome.ABORTED
    await asyncio.gather(*coordinated.spawned)
    assert coordinated.requests == [
        (partition, peer_protocol.ResolveAcks(attempt.name, commit=False)) for partition in (1, 2)
    ]


async def test_a_preparation_that_fails_waits_for_the_others(coordinated: Coordinated):
    """Otherwise the attempt would be aborted while a partition still prepares it."""
    attempt = coordinated.transactions.begin("client-1", 7, [1, 2])
    coordinated.failing[1] = [errors.NotConnected("not registered")]
    coordinated.slow_s[2] = 3.0
    client: Any = types.SimpleNamespace(name="client-1", identity="ann")
    with pytest.raises(errors.NotConnected):
        await coordinated.transactions.prepare(attempt, client, {1: {}, 2: {}})
    assert not coordinated.slow_s, "partition 2 has replied"


async def test_a_decision_is_completed_although_the_log_is_full_for_a_while(coordinated: Coordinated):
    attempt = coordinated.transactions.begin("client-1", 7, [1])
    coordinated.decided[attempt.name] = [1]
    coordinated.transactions.decided(attempt)
    assert await coordinated.outcome(attempt) == peer_protocol.Outcome.COMMITTED
    coordinated.failing[1] = [errors.Unavailable("no reply")]
    coordinated.full = 2
    await coordinated.transactions.wait_completed([attempt.name])
    assert coordinated.requests == [(1, peer_protocol.ResolveAcks(attempt.name, commit=True))] * 2
    assert [record.completed for record in coordinated.stored] == [[attempt.name]]
    assert await coordinated.outcome(attempt) != peer_protocol.Outcome.UNDECIDED, "no caller waits for it"


async def test_a_successor_completes_what_is_decided(coordinated: Coordinated):
    coordinated.decided |= {"a/1/x": [1], "b/2/y": [1, 2]}
    coordinated.transactions.complete_all()
    await asyncio.gather(*coordinated.spawned)
    assert sorted(record.completed for record in coordinated.stored) == [["a/1/x"], ["b/2/y"]]
    assert len(coordinated.requests) == 3


def test_acknowledgements_are_divided_by_partition(coordinated: Coordinated):
    keys = [ledger.queue_key(f"jobs-{number}") for number in range(20)]
    acks = {key: [number] for number, key in enumerate(keys)}
    there = {key: numbers for key, numbers in acks.items() if partitions.of_key(key, COUNT) == HERE}
    assert there != acks
    assert coordinated.transactions.remote_acks(acks) == {HERE: there}

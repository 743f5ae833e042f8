"""What each client sent, received and acknowledged, and whether these records agree."""

from __future__ import annotations

import collections

from muster.message import destinations, errors
from muster.message.client import api, consumers
from muster.testing import eventually

IN = destinations.queue("in")
LEFT, RIGHT = destinations.queue("left"), destinations.queue("right")
NEWS = destinations.topic("news")
WAIT_S = 60.0


class TransferHistory:
    """Senders put each body into a queue and on a topic; a mover takes each from the queue to two others in
    one transaction; a reader with a durable subscription acknowledges each by itself."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.accepted: list[str] = []
        self.moved: dict[str, None] = {}
        self.read: dict[str, None] = {}
        self.rolled_back = 0
        self.again: list[str] = []  # came although its acknowledgement had been confirmed

    async def reached(self, count: int) -> None:
        """Until so many were moved and read."""
        await eventually.eventually(
            lambda: min(len(self.moved), len(self.read)) >= count, timeout_s=2 * WAIT_S
        )

    async def send(self, connection: api.Connection, name: str, count: int) -> None:
        producer = connection.session().producer()
        for number in range(count):
            body = f"{name} {number}"
            await producer.send(body, to=IN)
            await producer.send(body, to=NEWS)
            self.accepted.append(body)

    async def move(self, connection: api.Connection) -> None:
        session = connection.session(api.AcknowledgeMode.TRANSACTED)
        consumer = await session.consumer(IN, prefetch=10)
        producer = session.producer()
        while len(self.moved) < self.total:
            message = await consumer.receive(WAIT_S)
            assert message is not None, f"only {len(self.moved)} of {self.total} were moved"
            body = str(message.body())
            if body in self.moved:
                self.again.append(body)
            for out in (LEFT, RIGHT):
                await producer.send(body, to=out)
            try:
                await session.commit()
            except errors.TransactionRolledBack:
                self.rolled_back += 1
            else:
                self.moved[body] = None

    async def follow(self, consumer: consumers.Consumer) -> None:
        """By a subscription that is older than the first message."""
        while len(self.read) < self.total:
            message = await consumer.receive(WAIT_S)
            assert message is not None, f"only {len(self.read)} of {self.total} were read"
            body = str(message.body())
            if body in self.read:
                self.again.append(body)
            await message.acknowledge()
            self.read[body] = None

    async def judge(self, connection: api.Connection) -> None:
        """When all clients have finished."""
        session = connection.session()
        left, right = [
            [str(message.body()) async for message in session.browse(out)] for out in (LEFT, RIGHT)
        ]
        assert left == right, "a transaction is done as a whole"
        counts = collections.Counter(left)
        assert not set(self.accepted) - counts.keys(), "nothing accepted is lost"
        assert not [body for body, count in counts.items() if count > 1], "no transaction is done twice"
        assert [message.body() async for message in session.browse(IN)] == [], "what was moved is taken"
        assert self.again == [], "what was confirmed does not come again"
        for story in (left, list(self.moved), list(self.read)):
            assert set(story) == set(self.accepted)
            for name in {body.split()[0] for body in story}:
                numbers = [int(body.split()[1]) for body in story if body.split()[0] == name]
                assert numbers == sorted(numbers), "the order of a session is kept"

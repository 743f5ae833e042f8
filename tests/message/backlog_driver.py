"""Drives a backlog as the dispatcher does, with a dictionary as the log."""

from __future__ import annotations

from muster.message import messages, retries
from muster.message.dispatcher import backlog
from muster.message.dispatcher.log import message_cache


class DrivenBacklog(backlog.Backlog):
    """``in_memory``: how many messages can be looked up at one time; None: all."""

    def __init__(
        self,
        key: str = "q",
        *,
        in_memory: int | None = None,
        floor: int = 0,
        max_deliveries: int = 0,
        delay_s: float = 0.0,
    ) -> None:
        super().__init__(key, floor=floor, policy=retries.Retry(max_deliveries, delay_s))
        self.log: dict[int, message_cache.CachedMessage] = {}
        self.reads = 0
        self._in_memory = in_memory
        self._loaded: dict[int, None] = {}

    def send(self, number: int, meta: messages.MessageMeta) -> None:
        self.log[number] = message_cache.CachedMessage(meta, "", b"")
        self.arrive(number, meta)

    def lookup(self, number: int) -> message_cache.CachedMessage | None:
        return self.log[number] if self._in_memory is None or number in self._loaded else None

    def deliver(self, now_ms: int = 0) -> list[backlog.Instruction]:
        """Everything that can be delivered now, reading the log where necessary."""
        self.early = True
        while (line := self.unscanned_line()) is not None:
            for number in list(self.pending):
                self.scan(line, number, self.log[number].meta)
            self.scanned(line)
        instructions = self.pump(now_ms, self.lookup)
        while self.is_blocked:
            expected = self.next_to_read(self._in_memory or 1, self.lookup)
            assert expected, "a blocked line needs a message"
            self.reads += len(expected)
            self._loaded = dict.fromkeys(expected)
            self.unblock()
            instructions += self.pump(now_ms, self.lookup)
        return instructions

    def waiting(self) -> list[int]:
        """The messages that no consumer holds, in the order of delivery."""
        reserved = [item for consumer in self.consumers.values() for item in consumer.reserved.items()]
        items = sorted([*self._waiting.items(), *reserved], key=lambda item: (-item[0], item[1]))
        return [number for _, number in items]

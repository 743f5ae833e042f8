"""One queue or durable subscription: the waiting messages, their consumers, and the messages these hold.

Pure: events in, `DeliverMessage`, `ExpireMessage` and `DeadLetterMessage` out. A message is a `BacklogEntry`
from the time it is loaded until it is done. At most ``window`` entries and `WINDOW_BYTES` are held,
independent of the length of the backlog; the rest is a position in the log.

    floor      everything up to here is done
    done       what is done above the floor, unless the next line implies it
    position   everything up to here is held, done or of other queues; loading continues after it
    live       position is the end of the log: new messages arrive as they are stored
    finishing  being stored as done: until this succeeds or fails, no other consumer receives it

Memory therefore grows neither with the backlog nor with what is done after a message that no consumer takes.

The order is by priority, then by sequence; a released message returns to its old place. A message that no
present consumer selects is parked, and examined again only when the consumers change. Messages of a group go
to one consumer as long as it is attached.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from muster.message import messages, selectors
from muster.message.dispatcher import sequence_set

WINDOW = 2000
WINDOW_BYTES = 32 << 20
PRIORITIES = 10
# Above this, the least used groups without held messages are forgotten.
GROUPS_MAX = 10_000


@dataclass(slots=True, eq=False)
class BacklogEntry:
    sequence: int
    meta: messages.MessageMeta
    raw: str
    data: bytes
    count: int = 0  # previous deliveries
    failures: int = 0  # failed deliveries, as far as known
    holder: ConsumerKey | None = None


ConsumerKey = tuple[str, int]  # connection, number


@dataclass(slots=True, eq=False)
class BacklogConsumer:
    key: ConsumerKey
    credit: int = 0
    selector: str | None = None
    held: dict[int, None] = field(default_factory=dict)  # in the order of delivery


@dataclass(frozen=True, slots=True)
class DeliverMessage:
    consumer: ConsumerKey
    entry: BacklogEntry


@dataclass(frozen=True, slots=True)
class ExpireMessage:
    entry: BacklogEntry


@dataclass(frozen=True, slots=True)
class DeadLetterMessage:
    entry: BacklogEntry
    reason: str


Instruction = DeliverMessage | ExpireMessage | DeadLetterMessage


class Backlog:
    def __init__(self, key: str, *, floor: int = 0, window: int = WINDOW, max_deliveries: int = 0) -> None:
        self.key = key
        self.floor = floor
        self.done = sequence_set.SequenceSet()
        self.position = floor
        self.live = False
        self.generation = 0  # a load that started before an `unload` must stop
        self.window = window
        self.max_deliveries = max_deliveries
        self.suspect = 0  # up to here, an earlier dispatcher may have delivered
        # Deliveries and failures of messages that are not held now
        self.counts: dict[int, tuple[int, int]] = {}
        self.entries: dict[int, BacklogEntry] = {}
        self.bytes = 0  # of the entries
        self.consumers: dict[ConsumerKey, BacklogConsumer] = {}
        self.delivered = 0
        self.expired = 0
        self.matched = 0  # accepted by a selector
        self.rejected = 0  # rejected by every consumer present
        self._finishing: set[int] = set()
        self._ready: list[deque[BacklogEntry]] = [deque() for _ in range(PRIORITIES)]
        self._parked: list[BacklogEntry] = []
        self._turn: deque[BacklogConsumer] = deque()
        self._groups: dict[str, ConsumerKey] = {}

    # Entries.

    @property
    def room(self) -> int:
        return self.window - len(self.entries) if self.bytes < WINDOW_BYTES else 0

    @property
    def is_low(self) -> bool:
        """Whether more should be loaded."""
        return len(self.entries) <= self.window // 2 and self.bytes <= WINDOW_BYTES // 2

    def waiting(self) -> Iterator[BacklogEntry]:
        """The entries that no consumer holds, in order."""
        for priority in reversed(range(PRIORITIES)):
            parked = [entry for entry in self._parked if _level(entry) == priority]
            yield from sorted([*self._ready[priority], *parked], key=lambda entry: entry.sequence)

    def is_done(self, sequence: int) -> bool:
        return (
            sequence <= self.floor
            or (sequence <= self.position and sequence not in self.entries)
            or sequence in self.done
        )

    def is_over(self, sequence: int, head: int) -> bool:
        """Whether the message is no longer needed here; ``head`` is the end of the log."""
        return self.is_done(sequence) or (self.live and sequence <= head and sequence not in self.entries)

    def arrive(self, sequence: int, meta: messages.MessageMeta, raw: str, data: bytes) -> None:
        """A message of the log. Messages arrive in log order."""
        self.position = max(self.position, sequence)
        if sequence in self.done or sequence <= self.floor or sequence in self.entries:
            return
        count, failures = self.counts.pop(sequence, (0, 0))
        if not count and sequence <= self.suspect:
            count = 1
        entry = self.entries[sequence] = BacklogEntry(sequence, meta, raw, data, count, failures)
        self.bytes += len(data)
        if sequence in self._finishing:
            return
        ready = self._ready[_level(entry)]
        if ready and ready[-1].sequence > sequence:  # equivalent (Gt -> GtE): no two have one number
            self._insert(entry)
        else:
            ready.append(entry)

    def overflow(self, sequence: int) -> None:
        """There is no room for a new message: it and later ones are read from the log later."""
        if self.live:
            self.live = False
            self.position = sequence - 1

    def unload(self) -> None:
        """Drop all entries, because there are no consumers. Only the counts remain."""
        for entry in self.entries.values():
            if entry.count:
                self.counts[entry.sequence] = (entry.count, entry.failures)
        self._note_done()
        self.position = self.floor
        self.live = False
        self.generation += 1
        self.entries.clear()
        self.bytes = 0
        self._parked.clear()
        for ready in self._ready:
            ready.clear()

    def settle(self, head: int) -> int:
        """Raise the floor as far as possible; ``head`` is the end of the log."""
        first = min(self.entries, default=None)
        reached = head if self.live else self.position
        if first is not None:
            reached = min(reached, first - 1)
        self.floor = max(self.floor, reached)
        self._note_done()
        self.floor = max(self.floor, self.done.end_of(self.floor + 1))
        self.position = max(self.position, self.floor)
        self.done.cut(self.floor)
        return self.floor

    def _note_done(self) -> None:
        """Everything up to the position that is not held is done or belongs to other queues."""
        if self.position > self.floor:
            self.done.cover(self.floor + 1, self.position, sorted(self.entries))
        self.done.cut(self.floor)

    # Consumers.

    def attach(self, consumer: BacklogConsumer) -> None:
        self.consumers[consumer.key] = consumer
        self._turn.append(consumer)
        self._unpark()

    def detach(self, key: ConsumerKey, *, seen: Iterable[int] | None) -> list[Instruction]:
        """``seen``: messages that the client saw; they count as delivered.

        None: the client was lost. It may have seen everything that it held, so all of it counts as delivered.
        Only the oldest message counts as a failure: the client has acknowledged those before it, and may not
        have processed those after it.
        """
        consumer = self.consumers.pop(key, None)
        if consumer is None:
            return []
        self._turn.remove(consumer)
        self._groups = {group: holder for group, holder in self._groups.items() if holder != key}
        held = [sequence for sequence in consumer.held if sequence not in self._finishing]
        failed = set(held[:1]) if seen is None else set(seen)
        counted = set(consumer.held) if seen is None else failed
        instructions: list[Instruction] = []
        for sequence in sorted(consumer.held):
            instructions += self._back(sequence, counted=sequence in counted, failed=sequence in failed)
        self._unpark()
        return instructions

    def credit(self, key: ConsumerKey, more: int) -> None:
        if consumer := self.consumers.get(key):
            consumer.credit += more

    def stop(self, key: ConsumerKey) -> None:
        if consumer := self.consumers.get(key):
            consumer.credit = 0

    # Outcomes.

    def holds(self, sequence: int, connection: str) -> bool:
        """Whether this connection may acknowledge the message: it holds it, or no consumer does."""
        if self.is_done(sequence) or sequence in self._finishing:
            return False
        entry = self.entries.get(sequence)
        return entry is None or entry.holder is None or entry.holder[0] == connection

    def start_finish(self, sequences: Iterable[int]) -> None:
        """The messages are about to be stored as done; `finish` or `cancel_finish` follows."""
        for sequence in sequences:
            self._finishing.add(sequence)
            entry = self.entries.get(sequence)
            if entry is not None and entry.holder is None:
                self._forget(entry)

    def cancel_finish(self, sequences: Iterable[int]) -> None:
        """Storing failed: messages that no consumer holds wait again."""
        for sequence in sequences:
            if sequence in self._finishing:
                self._finishing.discard(sequence)
                entry = self.entries.get(sequence)
                if entry is not None and entry.holder is None:
                    self._insert(entry)

    def finish(self, sequence: int) -> bool:
        """The message is stored as done. False: it already was."""
        self._finishing.discard(sequence)
        if self.is_done(sequence):
            return False
        self.counts.pop(sequence, None)
        entry = self.entries.pop(sequence, None)
        if entry is None:
            self.done.add(sequence)
        else:
            self.bytes -= len(entry.data)
            if entry.holder is None:
                self._forget(entry)
            self._let_go(entry)
        return True

    def release(
        self, sequences: Iterable[int], connection: str, *, counted: bool, reason: str | None = None
    ) -> list[Instruction]:
        instructions: list[Instruction] = []
        for sequence in sequences:
            entry = self.entries.get(sequence)
            if entry is None or entry.holder is None or entry.holder[0] != connection:
                continue
            if reason is not None and sequence not in self._finishing:
                entry.count += 1
                self._let_go(entry)
                instructions.append(self._dead(entry, reason))
            else:
                instructions += self._back(sequence, counted=counted, failed=counted)
        return instructions

    def _back(self, sequence: int, *, counted: bool, failed: bool) -> list[Instruction]:
        entry = self.entries[sequence]
        self._let_go(entry)
        entry.count += counted
        entry.failures += failed
        if sequence in self._finishing:
            return []
        if self.max_deliveries and entry.failures >= self.max_deliveries:
            return [self._dead(entry, f"delivered {entry.count} times without being acknowledged")]
        self._insert(entry)
        return []

    def _dead(self, entry: BacklogEntry, reason: str) -> DeadLetterMessage:
        self._finishing.add(entry.sequence)
        return DeadLetterMessage(entry, reason)

    def withdraw(self, sequence: int) -> bool:
        """Start to finish a message that no consumer holds. False: one holds it, or it is being finished."""
        entry = self.entries.get(sequence)
        if sequence in self._finishing or (entry is not None and entry.holder is not None):
            return False
        self.start_finish([sequence])
        return True

    def _let_go(self, entry: BacklogEntry) -> None:
        if entry.holder is not None:
            if consumer := self.consumers.get(entry.holder):
                consumer.held.pop(entry.sequence, None)
            entry.holder = None

    def _forget(self, entry: BacklogEntry) -> None:
        """Remove the entry from the waiting lists."""
        ready = self._ready[_level(entry)]
        if entry in ready:
            ready.remove(entry)
        elif entry in self._parked:
            self._parked.remove(entry)

    def _insert(self, entry: BacklogEntry) -> None:
        ready = self._ready[_level(entry)]
        at = bisect.bisect(ready, entry.sequence, key=lambda other: other.sequence)
        ready.insert(at, entry)

    def _unpark(self) -> None:
        parked, self._parked = self._parked, []
        for entry in parked:
            self._insert(entry)

    # Delivery.

    def pump(self, now_ms: int) -> list[Instruction]:
        """Deliver as much as possible."""
        instructions: list[Instruction] = []
        if not any(consumer.credit > 0 for consumer in self._turn):
            return instructions
        for ready in reversed(self._ready):
            kept: deque[BacklogEntry] = deque()
            while ready:
                entry = ready.popleft()
                if entry.meta.expiration_ms and entry.meta.expiration_ms <= now_ms:
                    self.expired += 1
                    self._finishing.add(entry.sequence)
                    instructions.append(ExpireMessage(entry))
                    continue
                consumer, selected = self._taker(entry)
                if consumer is not None:
                    self._hand(entry, consumer)
                    instructions.append(DeliverMessage(consumer.key, entry))
                elif selected:
                    kept.append(entry)
                    # Continuing would change nothing, but cost time.
                    if not any(other.credit > 0 for other in self._turn):  # equivalent (Gt -> GtE): see above
                        break
                else:
                    self.rejected += 1
                    self._parked.append(entry)
            kept.extend(ready)
            ready.clear()
            ready.extend(kept)
        return instructions

    def _hand(self, entry: BacklogEntry, consumer: BacklogConsumer) -> None:
        entry.holder = consumer.key
        consumer.held[entry.sequence] = None
        consumer.credit -= 1
        self.delivered += 1
        self.matched += consumer.selector is not None

    def _taker(self, entry: BacklogEntry) -> tuple[BacklogConsumer | None, bool]:
        """The consumer that receives the message now, and whether any present consumer selects it."""
        group = entry.meta.group
        if group is not None and (holder := self._groups.get(group)) is not None:
            consumer = self.consumers[holder]
            if consumer.credit <= 0:
                return None, True
            if selectors.accepts(consumer.selector, entry.meta):
                self._groups[group] = self._groups.pop(group)  # the least used groups are first
                return consumer, True  # equivalent (True -> False): for a consumer it is not read
        selected = False
        for at, consumer in enumerate(self._turn):
            if selectors.accepts(consumer.selector, entry.meta):
                selected = True
                if consumer.credit > 0:
                    self._turn.rotate(-(at + 1))
                    if group is not None:
                        self._join(group, consumer)
                    return consumer, True  # equivalent (True -> False): for a consumer it is not read
        return None, selected

    def _join(self, group: str, consumer: BacklogConsumer) -> None:
        self._groups[group] = consumer.key
        if len(self._groups) > GROUPS_MAX:
            held = {entry.meta.group for entry in self.entries.values() if entry.holder is not None}
            least = list(self._groups)[: GROUPS_MAX // 2]
            for other in least:
                if other not in held:
                    del self._groups[other]


def _level(entry: BacklogEntry) -> int:
    return min(max(entry.meta.priority, 0), PRIORITIES - 1)

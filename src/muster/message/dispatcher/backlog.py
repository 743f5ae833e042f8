"""One queue or durable subscription: an index of its messages, the consumers, and the messages these hold.

Pure: events in, `DeliverMessage`, `ExpireMessage` and `DeadLetterMessage` out. The index covers the complete
queue, so selectors, priorities and groups apply to all of it. It contains numbers, 16 bytes for each message,
and no bodies: these stay in the log. `pump` looks a message up when its turn comes. If it is not in memory,
its line is blocked until the caller has read the messages that `next_to_read` names and calls `unblock`.

    floor      everything up to here is done
    done       what is done above the floor
    position   everything up to here is indexed, done or of other queues; indexing continues after it
    live       position is the end of the log: new messages arrive as they are stored
    pending    the indexed messages that are not done: waiting, reserved, held, finishing or retried later
    finishing  being stored as done: until this succeeds or fails, no consumer receives it

The order is by priority, then by sequence; a released message returns to its old place. Consumers with the
same selector form a line (`lines`) and take turns. A new selector has to be compared with all messages once
(`unscanned_line`, `scanned`); its consumers receive nothing until that is done. Messages of a group go to one
consumer as long as it is attached; while it has no credit, they are reserved for it. A message that one
consumer returned for others does not go to it again; while no other can receive it, it is set aside.

A message whose delivery failed may have to wait (`RetryMessage`); later ones overtake it meanwhile.

The work for each message does not depend on the depth of the queue.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from muster.message import messages, retries, selectors
from muster.message.dispatcher.index import groups, lines, selector_lines, sequence_set, sorted_numbers

# Messages finished, at least, before lines are freed of messages that are done.
COMPACT_AFTER = 1000  # equivalent: any bound of this order serves


class LoadedMessage(Protocol):
    """A message that was read from the log."""

    @property
    def meta(self) -> messages.MessageMeta: ...
    @property
    def raw(self) -> str: ...
    @property
    def data(self) -> bytes: ...


Lookup = Callable[[int], LoadedMessage | None]


Source = lines.SelectorLine | lines.BacklogConsumer


# Not frozen: one is created for each delivery, which takes a third of the time.
@dataclass(slots=True)
class DeliverMessage:
    consumer: lines.ConsumerKey
    number: int
    count: int  # previous deliveries
    message: LoadedMessage


@dataclass(frozen=True, slots=True)
class ExpireMessage:
    number: int


@dataclass(frozen=True, slots=True)
class DeadLetterMessage:
    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class RetryMessage:
    """Call `Backlog.retry` after this delay."""

    number: int
    delay_s: float


Instruction = DeliverMessage | ExpireMessage | DeadLetterMessage | RetryMessage


class Backlog:
    def __init__(self, key: str, *, floor: int = 0, policy: retries.Retry = retries.AT_ONCE) -> None:
        self.key = key
        self.floor = floor
        self.done = sequence_set.SequenceSet()
        self.position = floor
        self.live = False
        self.early = False  # deliver although not everything is indexed
        self.policy = policy
        self.suspect = 0  # up to here, an earlier dispatcher may have delivered
        # Deliveries and failures of messages that are not held now
        self.counts: dict[int, tuple[int, int]] = {}
        self.pending = sorted_numbers.SortedNumbers()
        self.consumers: dict[lines.ConsumerKey, lines.BacklogConsumer] = {}
        self.held: dict[int, lines.HeldMessage] = {}
        self.delivered = 0
        self.expired = 0
        self.matched = 0  # accepted by a selector
        self.rejected = 0  # compared with selectors, and accepted by none of them
        self._finishing: dict[int, int | None] = {}  # with the level, if known
        self._waiting = lines.PriorityNumbers()
        self._lines = selector_lines.SelectorLines(self._waiting)
        # Selectors whose line no longer contains a pending message that is not waiting now
        self._skipped: dict[int, set[str]] = {}
        # Consumers that do not receive a message, because they returned it for others or select others
        self._excluded: dict[int, set[lines.ConsumerKey]] = {}
        self._aside: dict[int, int] = {}  # the level of messages that wait for other consumers
        self._later: dict[int, int] = {}  # the level of messages that wait for their retry
        # Lines and consumers (with reserved messages) that may have something to deliver
        self._active: OrderedDict[Source, None] = OrderedDict()
        self._blocked: dict[Source, None] = {}  # those whose next message has to be read from the log
        self._groups = groups.GroupOwners()
        self._finished = 0  # since the lines were last compacted

    # The index.

    def is_done(self, number: int) -> bool:
        if number in self.held:
            return False
        return (
            number <= self.floor
            or (number <= self.position and number not in self.pending)
            or number in self.done
        )

    def is_over(self, number: int, head: int) -> bool:
        """Whether the message is no longer needed here; ``head`` is the end of the log."""
        return self.is_done(number) or (self.live and number <= head and number not in self.pending)

    def arrive(self, number: int, meta: messages.MessageMeta) -> None:
        """Index a message of the log. Messages arrive in log order."""
        self.position = max(self.position, number)
        if number <= self.floor or number in self.done or not self.pending.add(number):
            return
        level = lines.level_of(meta)
        matches = self._lines.matching(meta)
        for line in matches:
            line.numbers.add(level, number)
            self._active[line] = None
        if not matches and self.consumers and not self._lines.plain.users:
            self.rejected += 1
        if number in self._finishing:
            self._finishing[number] = level
            return
        self._waiting.add(level, number)
        self._active[self._lines.plain] = None

    def start_empty(self, position: int) -> None:
        """The log contains no messages of this backlog up to ``position``: it is live from the beginning."""
        self.live = True
        self.position = self.floor = position

    def unload(self) -> None:
        """Drop the index, because there are no consumers."""
        self.position = self.floor
        self.live = self.early = False
        self.pending.clear()
        self._skipped.clear()
        self._aside.clear()
        self._later.clear()
        self._excluded.clear()
        self._finishing = dict.fromkeys(self._finishing)
        self._forget_lines(self._lines.clear())

    def settle(self, head: int) -> int:
        """Raise the floor as far as possible; ``head`` is the end of the log."""
        first = self.pending.first
        reached = head if self.live else self.position
        self.floor = max(self.floor, reached if first is None else min(reached, first - 1))
        self.floor = max(self.floor, self.done.end_of(self.floor + 1))
        self.position = max(self.position, self.floor)
        self.done.cut(self.floor)
        return self.floor

    def _mark_done(self, number: int, before: int | None, after: int | None) -> None:
        """``before`` and ``after``: the neighbours of the message in the index.

        Everything between them is done or belongs to other queues, so the number of ranges in ``done``
        depends on the messages that are left only.
        """
        last = max(self.position, number) if after is None else after - 1
        if before is None:
            self.floor = last
            if self.done:
                self.done.cut(self.floor)
        else:
            self.done.add(before + 1, last)
        self._finished += 1
        if self._finished > max(COMPACT_AFTER, 2 * len(self.pending)):
            self._finished = 0
            self._lines.retain_only(self.pending)

    # Selectors.

    def unscanned_line(self) -> lines.SelectorLine | None:
        """A line whose selector has to be compared with earlier messages."""
        return self._lines.unscanned()

    def scan(self, line: lines.SelectorLine, number: int, meta: messages.MessageMeta) -> None:
        """Compare the selector of a line with a message that was indexed before the line existed."""
        if number not in self.pending:
            return
        if selectors.accepts(line.selector, meta):
            line.numbers.add(lines.level_of(meta), number)
        elif not self._lines.plain.users:
            self.rejected += 1

    def scanned(self, line: lines.SelectorLine) -> None:
        """All earlier messages have been compared."""
        line.unscanned = 0
        self._active[line] = None
        self._active.update((consumer, None) for consumer in line.turn if consumer.reserved)

    def _forget_lines(self, dropped: Iterable[lines.SelectorLine]) -> None:
        for line in dropped:
            self._active.pop(line, None)  # equivalent: a line without consumers serves nothing
            self._blocked.pop(line, None)

    # Consumers.

    def attach(self, consumer: lines.BacklogConsumer) -> None:
        self.consumers[consumer.key] = consumer
        self._lines.use(consumer.selector, self.position if self.pending else 0)
        self._enter_turn(consumer)

    def detach(self, key: lines.ConsumerKey, *, seen: Iterable[int] | None) -> list[Instruction]:
        """``seen``: messages that the client saw; they count as delivered.

        None: the client was lost. It may have seen everything that it held, so all of it counts as delivered.
        Only the oldest message counts as a failure: the client has acknowledged those before it, and may not
        have processed those after it.
        """
        consumer = self.consumers.pop(key, None)
        if consumer is None:
            return []
        line = self._lines[consumer.selector]
        if consumer.in_turn:
            line.turn.remove(consumer)
        self._active.pop(consumer, None)
        self._blocked.pop(consumer, None)
        self._groups.leave(consumer)
        held = [number for number in consumer.held if number not in self._finishing]
        failed = set(held[:1]) if seen is None else set(seen)
        counted = set(consumer.held) if seen is None else failed
        instructions: list[Instruction] = []
        for number in sorted(consumer.held):
            instructions += self._back(number, counted=number in counted, failed=number in failed)
        for level, number in consumer.reserved.items():
            self._wait(level, number)
        self._forget_lines(self._lines.leave(line))
        return instructions

    def credit(self, key: lines.ConsumerKey, more: int) -> None:
        if consumer := self.consumers.get(key):
            may_take_aside = consumer.credit <= 0  # otherwise nothing that it may receive was set aside
            consumer.credit += more
            self._enter_turn(consumer, may_take_aside=may_take_aside)

    def stop(self, key: lines.ConsumerKey) -> None:
        if consumer := self.consumers.get(key):
            consumer.credit = 0

    def _enter_turn(self, consumer: lines.BacklogConsumer, *, may_take_aside: bool = True) -> None:
        if consumer.credit > 0:
            line = self._lines[consumer.selector]
            self._active[line] = None
            if consumer.reserved:
                self._active[consumer] = None
            if not consumer.in_turn:
                consumer.in_turn = True
                line.turn.append(consumer)
            for number in [
                number
                for number in (self._aside if may_take_aside else ())
                if consumer.key not in self._excluded.get(number, ())
            ]:
                self._wait(self._aside.pop(number), number)

    # Outcomes.

    def holds(self, number: int, connection: str) -> bool:
        """Whether this connection may acknowledge the message: it holds it, or no consumer does."""
        if self.is_done(number) or number in self._finishing:
            return False
        held = self.held.get(number)
        return held is None or held.holder.key[0] == connection

    def start_finish(self, numbers: Iterable[int]) -> None:
        """The messages are about to be stored as done; `finish` or `cancel_finish` follows."""
        for number in numbers:
            self._finishing[number] = None if number in self.held else self._stop_waiting(number)

    def cancel_finish(self, numbers: Iterable[int]) -> None:
        """Storing failed: messages that no consumer holds wait again."""
        for number in numbers:
            level = self._finishing.pop(number, None)
            if level is not None and number in self.pending and number not in self.held:
                self._wait(level, number)

    def finish(self, number: int) -> bool:
        """The message is stored as done. False: it already was."""
        self._finishing.pop(number, None)
        if (held := self.held.get(number)) is not None:
            self._let_go(held)
        elif self.is_done(number):
            return False
        else:
            self._stop_waiting(number)
        self.counts.pop(number, None)
        self._skipped.pop(number, None)
        self._excluded.pop(number, None)
        neighbours = self.pending.remove(number)
        if neighbours is None:
            self.done.add(number)
        else:
            self._mark_done(number, *neighbours)
        return True

    def release(
        self,
        numbers: Iterable[int],
        connection: str,
        *,
        counted: bool,
        reason: str | None = None,
        elsewhere: bool = False,
        delay_s: float = 0.0,
        error: str = "",
    ) -> list[Instruction]:
        """``elsewhere``: for other consumers than the one that held it. ``delay_s``: at least, before it is
        delivered again. ``error``: why the delivery failed.
        """
        instructions: list[Instruction] = []
        for number in numbers:
            held = self.held.get(number)
            if held is None or held.holder.key[0] != connection:
                continue
            if reason is not None and number not in self._finishing:
                self._let_go(held)
                instructions.append(self._dead(held, reason))
            else:
                if elsewhere:
                    self._excluded.setdefault(number, set()).add(held.holder.key)
                instructions += self._back(
                    number, counted=counted, failed=counted, delay_s=delay_s, error=error
                )
        return instructions

    def retry(self, number: int) -> None:
        """The delay of a `RetryMessage` is over."""
        level = self._later.pop(number, None)
        if level is not None:
            self._wait(level, number)

    def withdraw(self, number: int) -> bool:
        """Start to finish a message that no consumer holds. False: one holds it, or it is being finished."""
        if number in self._finishing or number in self.held:
            return False
        self.start_finish([number])
        return True

    def _back(
        self, number: int, *, counted: bool, failed: bool, delay_s: float = 0.0, error: str = ""
    ) -> list[Instruction]:
        held = self.held[number]
        self._let_go(held)
        count, failures = held.count + counted, held.failures + failed
        if count:
            self.counts[number] = (count, failures)
        if number in self._finishing:
            self._finishing[number] = held.level
            return []
        if self.policy.attempts and failures >= self.policy.attempts:
            reason = f"delivered {count} times without being acknowledged"
            return [self._dead(held, f"{reason}; last error: {error}" if error else reason)]
        if failed:
            delay_s = max(delay_s, self.policy.delay_after(failures))
        if delay_s:
            self._later[number] = held.level
            return [RetryMessage(number, delay_s)]
        self._wait(held.level, number)
        return []

    def _dead(self, held: lines.HeldMessage, reason: str) -> DeadLetterMessage:
        self._finishing[held.number] = held.level
        return DeadLetterMessage(held.number, reason)

    def _let_go(self, held: lines.HeldMessage) -> None:
        del self.held[held.number]
        held.holder.held.pop(held.number, None)

    def _wait(self, level: int, number: int) -> None:
        """A message waits again, in its old place."""
        self._waiting.add(level, number)
        self._active[self._lines.plain] = None
        for selector in self._skipped.pop(number, ()):
            if (line := self._lines.get(selector)) is not None:
                line.numbers.add(level, number)
                self._active[line] = None

    def _stop_waiting(self, number: int) -> int | None:
        """Remove the message from those that wait, and return its level; None if it was not waiting."""
        for apart in (self._aside, self._later):
            if number in apart:
                return apart.pop(number)
        for numbers in (self._waiting, *(consumer.reserved for consumer in self.consumers.values())):
            if (level := numbers.level(number)) is not None:
                numbers.discard(level, number)
                return level
        return self._finishing.get(number)

    # Delivery.

    def pump(self, now_ms: int, lookup: Lookup) -> list[Instruction]:
        """Deliver as much as possible of what is in memory."""
        instructions: list[Instruction] = []
        if not (self.live or self.early):
            return instructions
        active = self._active
        while active:
            source = next(iter(active))
            while self._serve(source, now_ms, lookup, instructions):
                if len(active) > 1:  # they take turns
                    active.move_to_end(source)
                    break
            else:
                del active[source]
        return instructions

    @property
    def is_blocked(self) -> bool:
        """Whether messages that could be delivered have to be read from the log first."""
        return bool(self._blocked)

    def next_to_read(self, limit: int, lookup: Lookup) -> list[int]:
        """The next messages to read from the log, in the order of delivery."""
        next_numbers: dict[int, None] = {}
        for source in self._blocked:
            if isinstance(source, lines.BacklogConsumer):
                reserved, numbers = source.reserved, self._lines[source.selector].numbers
            else:
                reserved = source.turn[0].reserved if source.turn else lines.PriorityNumbers()
                numbers = source.numbers
            following = (number for level, number in numbers.items() if self._waiting.includes(level, number))
            for candidates in (iter(reserved), following):
                for number in itertools.islice(candidates, limit):
                    if lookup(number) is None:
                        next_numbers[number] = None
        return list(next_numbers)

    def wake(self) -> None:
        """Consider all lines again."""
        self._active.update((line, None) for line in self._lines)
        self._active.update((consumer, None) for consumer in self.consumers.values() if consumer.reserved)

    def unblock(self) -> None:
        """Messages that `next_to_read` named have been read."""
        self._active.update(self._blocked)
        self._blocked.clear()

    def _serve(self, source: Source, now_ms: int, lookup: Lookup, instructions: list[Instruction]) -> bool:
        """Pass on one message of a line, or one that is reserved for a consumer. False: there is none, or it
        cannot be delivered now.
        """
        if isinstance(source, lines.BacklogConsumer):
            line, consumer = self._lines[source.selector], source
            if consumer.credit <= 0 or not consumer.reserved:
                return False
        else:
            line = source
            while line.turn and line.turn[0].credit <= 0:
                line.turn.popleft().in_turn = False
            if not line.turn:
                return False
            consumer = line.turn[0]
        if line.unscanned and not self.early:
            return False
        first, reserved = self._first(line), consumer.reserved.first()
        is_reserved = reserved is not None and (first is None or lines.precedes(reserved, first))
        best = reserved if is_reserved else first
        if best is None:
            return False
        level, number = best
        message = lookup(number)
        if message is None:
            self._blocked[source] = None
            return False
        meta = message.meta
        if meta.expiration_ms and meta.expiration_ms <= now_ms:
            self.expired += 1
            self.start_finish([number])
            instructions.append(ExpireMessage(number))
            return True
        if is_reserved:
            consumer.reserved.discard(level, number)
            if not consumer.reserved:
                consumer.reserved_groups.clear()
        else:
            if number in self._excluded:
                self._waiting.discard(level, number)
                if (other := self._not_excluded(number, meta)) is None:
                    self._aside[number] = level
                else:
                    instructions.append(self._hand(level, number, message, other))
                return True
            owner = self._group_owner(meta.group, meta, consumer)
            self._waiting.discard(level, number)
            if owner is not consumer and (owner.credit <= 0 or owner.reserved):
                owner.reserved.add(level, number)
                owner.reserved_groups.add(meta.group or "")
                self._active[owner] = None
                return True
            if owner is not consumer:
                consumer = owner
            elif len(line.turn) > 1 and line.turn[0] is consumer:
                line.turn.rotate(-1)
        instructions.append(self._hand(level, number, message, consumer))
        return True

    def _not_excluded(self, number: int, meta: messages.MessageMeta) -> lines.BacklogConsumer | None:
        """A consumer with credit for a message that another one returned, whatever its group."""
        excluded = self._excluded[number]
        for consumer in self.consumers.values():
            if consumer.key not in excluded and not selectors.accepts(consumer.selector, meta):
                excluded.add(consumer.key)
            if consumer.key not in excluded and consumer.credit > 0:
                return consumer
        return None

    def _first(self, line: lines.SelectorLine) -> tuple[int, int] | None:
        """Level and number of the first waiting message of a line."""
        if line.selector is None:
            return self._waiting.first()
        while (first := line.numbers.first()) is not None and not self._waiting.includes(*first):
            line.numbers.discard(*first)
            if first[1] in self.pending:
                self._skipped.setdefault(first[1], set()).add(line.selector)
        return first

    def _hand(
        self, level: int, number: int, message: LoadedMessage, consumer: lines.BacklogConsumer
    ) -> DeliverMessage:
        count, failures = self.counts.pop(number, (0, 0))
        if not count and number <= self.suspect:
            count = 1
        held = lines.HeldMessage(number, level, message.meta.group, count, failures, consumer)
        self.held[number] = consumer.held[number] = held
        consumer.credit -= 1
        self.delivered += 1
        self.matched += consumer.selector is not None
        return DeliverMessage(consumer.key, number, count, message)

    def _group_owner(
        self, group: str | None, meta: messages.MessageMeta, consumer: lines.BacklogConsumer
    ) -> lines.BacklogConsumer:
        """The consumer that receives a message of a group: ``consumer``, unless the group has another."""
        if group is None:
            return consumer
        owner = self._groups.get(group)
        if owner is not None and (owner is consumer or selectors.accepts(owner.selector, meta)):
            self._groups.use(group)
            return owner
        self._groups.join(group, consumer, self.consumers.values())
        return consumer

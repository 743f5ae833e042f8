"""Settings section ``[message]``."""

from __future__ import annotations

import functools
import re
from typing import Annotated

import msgspec

from muster.core import errors, queue_names
from muster.core.settings import sections
from muster.core.settings.sections import field_doc
from muster.message import errors as message_errors
from muster.message import partitions as partitions_
from muster.message import retries


class QueueSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An entry of ``[[message.queues]]`` in the settings."""

    name: str  # of queues; * matches any text
    dead_letters: str = queue_names.DEAD_LETTERS  # the queue that undeliverable messages move to
    expired: str = ""  # the queue that expired messages move to; empty: they are discarded
    expiry_s: float = 0.0  # after this time, messages without a time to live expire; 0: never
    max_deliveries: int | None = None  # instead of `message.max_deliveries`
    redelivery_delay_s: float = 0.0  # before a message whose delivery failed is delivered again
    redelivery_backoff: float = 2.0  # factor of the delay after each further failure
    redelivery_delay_s_max: float = 60.0

    def __post_init__(self) -> None:
        if not self.name or not self.dead_letters:
            raise errors.InvalidInput("an entry of message.queues has a name, and a queue of dead letters")
        if self.expiry_s < 0 or (self.max_deliveries or 0) < 0:
            raise errors.InvalidInput(f"message.queues {self.name!r}: a time or number is negative")
        if self.matches(self.expired):
            raise errors.InvalidInput(
                f"message.queues {self.name!r}: expired messages would expire again in {self.expired!r}"
            )
        try:
            self.retry(0)
        except errors.InvalidInput as error:
            raise errors.InvalidInput(f"message.queues {self.name!r}: {error.message}") from error

    def retry(self, max_deliveries: int) -> retries.Retry:
        attempts = max_deliveries if self.max_deliveries is None else self.max_deliveries
        return retries.Retry(
            attempts, self.redelivery_delay_s, self.redelivery_backoff, self.redelivery_delay_s_max
        )

    def matches(self, queue: str) -> bool:
        return bool(queue) and _pattern(self.name).fullmatch(queue) is not None


@functools.lru_cache(1024)
def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, text.split("*"))), re.DOTALL)


_DEFAULT = QueueSettings(name="*")


class MessageSettings(sections.SettingsSection, frozen=True, kw_only=True):
    """JMS on the bus: whether this process runs a dispatcher, and its limits."""

    enabled: Annotated[
        bool,
        field_doc("Run a dispatcher in this process. Of several, one is active and the others stand by."),
    ] = True
    partitions: Annotated[
        int,
        field_doc(
            "Number of parts that the queues are divided into, each with its own log and dispatcher. The "
            "dispatchers are divided among the processes of the domain. Fixed when the domain first starts.",
            ge=1,
            le=partitions_.PARTITIONS_MAX,
        ),
    ] = 1
    processes: Annotated[
        int,
        field_doc(
            "Number of processes of this machine that run dispatchers, of which the domain is the first. 0: "
            "one for each core. At most one for each partition.",
            ge=0,
        ),
    ] = 0
    cache_bytes: Annotated[
        int,
        field_doc(
            "Messages that the dispatcher has read from the log and not delivered yet, in bytes. "
            "Of the others it keeps an index in memory, 16 bytes for each message.",
            ge=1 << 20,
        ),
    ] = 32 << 20
    max_deliveries: Annotated[
        int, field_doc("Failed deliveries after which a message becomes a dead letter. 0: never.", ge=0)
    ] = 10
    queues: Annotated[
        tuple[QueueSettings, ...],
        field_doc(
            "Settings of queues by name, in which * matches any text; the first entry that matches applies: "
            "the queues for dead_letters and expired messages (default: dead-letters, and discarded), "
            "expiry_s for messages without a time to live, max_deliveries, and redelivery_delay_s with "
            "redelivery_backoff and redelivery_delay_s_max (default: at once)."
        ),
    ] = ()
    create_queues: Annotated[
        bool,
        field_doc(
            "A queue begins with its first use. If false, only queues that message.queues names without * "
            "exist: sending to another one, receiving from it or browsing it is an error."
        ),
    ] = True
    max_message_bytes: Annotated[
        int,
        field_doc(
            "Maximum size of a message. Messages that do not fit into one message of the bus are stored in "
            "chunks.",
            ge=1 << 20,
        ),
    ] = 100 << 20
    connection_timeout_s: Annotated[
        float,
        field_doc(
            "Silence after which a client is considered lost; its messages go to others.",
            ge=5,
        ),
    ] = 15.0
    connections_per_identity: Annotated[
        int,
        field_doc("Maximum number of connections of an identity, gateways included.", ge=1),
    ] = 5000
    queues_per_identity: Annotated[
        int,
        field_doc(
            "Maximum number of queues in a partition that an identity has created, by sending to them, since "
            "the dispatcher started. Temporary queues do not count: they end with their connection.",
            ge=1,
        ),
    ] = 10_000
    subscriptions_per_identity: Annotated[
        int,
        field_doc(
            "Maximum number of durable subscriptions of an identity in a partition. Each stores the messages "
            "of its topic until they are received.",
            ge=1,
        ),
    ] = 1_000
    checkpoint_records: Annotated[
        int, field_doc("Number of batches after which the log's records are replaced by a checkpoint.", ge=10)
    ] = 5000

    def process_count(self, cores: int) -> int:
        return min(self.processes or cores, self.partitions)

    def check_exists(self, queue: str) -> None:
        """Raises `InvalidDestination` for a queue that clients may not create by using it."""
        if self.create_queues or queue == queue_names.DEAD_LETTERS or queue.startswith(queue_names.TEMPORARY):
            return
        if not any(queue in (entry.name, entry.dead_letters, entry.expired) for entry in self.queues):
            raise message_errors.InvalidDestination(
                f"there is no queue {queue!r}", hint="message.create_queues is off: message.queues names all"
            )

    def queue(self, name: str) -> QueueSettings:
        """The settings of a queue. Those of the dead letters are fixed."""
        if name == queue_names.DEAD_LETTERS or name.startswith(queue_names.TEMPORARY):
            return _DEFAULT
        return next((entry for entry in self.queues if entry.matches(name)), _DEFAULT)

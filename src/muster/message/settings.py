"""Settings of the messaging service."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """JMS on the bus.

    ``window``: messages of one queue or subscription in memory; selectors and priorities see no further.
    ``max_deliveries``: after so many failed ones a message is a dead letter; 0: never.
    """

    enabled: bool = True
    max_bytes: int = 1 << 30
    window: int = 2000
    max_deliveries: int = 10
    connection_timeout_s: float = 15.0
    checkpoint_records: int = 5000
    amqp_port: int | None = None

"""Settings section ``[message]``."""

from __future__ import annotations

from typing import Annotated

from muster.core.settings import sections
from muster.core.settings.sections import field_doc


class MessageSettings(sections.SettingsSection, frozen=True, kw_only=True):
    """JMS on the bus: whether this process runs a dispatcher, and its limits."""

    enabled: Annotated[
        bool,
        field_doc("Run a dispatcher in this process. Of several, one is active and the others stand by."),
    ] = True
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
    checkpoint_records: Annotated[
        int, field_doc("Number of batches after which the log's records are replaced by a checkpoint.", ge=10)
    ] = 5000

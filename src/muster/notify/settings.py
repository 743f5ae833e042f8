"""The section ``[notify]`` of the settings."""

from __future__ import annotations

from typing import Annotated

from muster.core.settings import sections
from muster.core.settings.sections import field_doc


class NotifySettings(sections.SettingsSection, frozen=True, kw_only=True):
    """Selective notification: whether a notifier runs here, and how patient it is."""

    enabled: Annotated[
        bool, field_doc("Whether a notifier runs in this process; others may run elsewhere.")
    ] = True
    stream_bytes: Annotated[
        int,
        field_doc("Budget of each of its streams. `receivers` and `events` refuse writers when full.", gt=0),
    ] = 256 << 20
    lease_s: Annotated[
        float,
        field_doc(
            "A dead notifier's receivers move to another after so long, or at once where a broker reports "
            "its end. Below 10 s, an election of a stream's leader can be mistaken for a death.",
            ge=1,
        ),
    ] = 15.0
    ack_wait_s: Annotated[
        float, field_doc("A durable event that is not acknowledged is delivered again after so long.", gt=0)
    ] = 5.0
    sender_pending: Annotated[
        int, field_doc("Events of one process that may wait for their turn; further ones are refused.", ge=1)
    ] = 1000
    beat_s: Annotated[
        float,
        field_doc("Notifiers tell each other what they hold so often; five silent beats: it is gone.", gt=0),
    ] = 1.0
    snapshot_changes: Annotated[
        int, field_doc("After so many messages a shard's log is replaced by its present state.", ge=10)
    ] = 20_000

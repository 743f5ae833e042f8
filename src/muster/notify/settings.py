"""The section ``[notify]`` of the settings."""

from __future__ import annotations

from typing import Annotated

from muster.core.settings import sections
from muster.core.settings.sections import field_doc


class NotifySettings(sections.SettingsSection, frozen=True, kw_only=True):
    """Selective notification: whether a notifier runs here, its limits and periods."""

    enabled: Annotated[
        bool, field_doc("Whether a notifier runs in this process; others may run elsewhere.")
    ] = True
    stream_bytes: Annotated[
        int,
        field_doc("Budget of each stream. `receivers` and `events` reject writes when full.", gt=0),
    ] = 256 << 20
    lease_s: Annotated[
        float,
        field_doc(
            "The receivers of a dead notifier move to another after this time, at once if a broker reports "
            "its end. The election of a stream leader is not mistaken for its end.",
            ge=1,
        ),
    ] = 6.0
    receivers_per_identity: Annotated[
        int,
        field_doc(
            "Receivers of one process at a notifier. Each takes about 100 bytes, and its policy once for all "
            "that have the same.",
            ge=1,
        ),
    ] = 250_000
    ack_wait_s: Annotated[
        float, field_doc("A durable event that is not acknowledged is delivered again after this time.", gt=0)
    ] = 5.0
    sender_pending: Annotated[
        int, field_doc("Events of one process that may wait; further ones are rejected.", ge=1)
    ] = 1000
    beat_s: Annotated[
        float,
        field_doc("Period in which notifiers publish summaries; one that misses five is removed.", gt=0),
    ] = 1.0
    snapshot_changes: Annotated[
        int, field_doc("After this number of messages the log of a shard is replaced by a snapshot.", ge=10)
    ] = 20_000

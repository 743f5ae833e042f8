"""The section ``[message]`` of the settings."""

from __future__ import annotations

from typing import Annotated

from muster.core.settings import sections
from muster.core.settings.sections import field_doc


class MessageSettings(sections.SettingsSection, frozen=True, kw_only=True):
    """JMS on the bus: whether a dispatcher of the log runs here, and its bounds."""

    enabled: Annotated[
        bool,
        field_doc("Whether a dispatcher runs in this process; of several, one acts and the others wait."),
    ] = True
    window: Annotated[
        int,
        field_doc(
            "Messages of one queue or subscription in memory, of at most 32 MiB in all. "
            "Selectors and priorities see no further.",
            ge=2,
        ),
    ] = 2000
    max_deliveries: Annotated[
        int, field_doc("A message that failed so often becomes a dead letter. 0: never.", ge=0)
    ] = 10
    connection_timeout_s: Annotated[
        float, field_doc("A client silent for so long is gone, and its messages go to others.", ge=5)
    ] = 15.0
    connections_per_identity: Annotated[
        int, field_doc("Connections of one identity, at gateways or its own; more are refused.", ge=1)
    ] = 5000
    checkpoint_records: Annotated[
        int, field_doc("After so many batches the log's records are replaced by their sum.", ge=10)
    ] = 5000

"""The settings section ``[retention]``: a budget for every stream, log and file."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from muster.core.settings import sections

doc = sections.field_doc

#: A report in the stream: 20 to 50 metrics, compressed with lz4 in messages of a thousand reports. Plain
#: reports (`benchmarks/monitor_rows.py`) have 80 bytes, realistic ones 325.
REPORT_BYTES = 350
_DAY_S = 86400.0
_GIB = 1 << 30
_MIB = 1 << 20


class RetentionBudget(sections.SettingsSection, frozen=True, kw_only=True):
    """A limit on stored data."""

    max_bytes: Annotated[
        int,
        doc("Maximum stored bytes. Formula: rate * message size * max_age_s, plus 50 % for bursts.", ge=_MIB),
    ]
    max_age_s: Annotated[
        float, doc("Older messages are deleted. 0: no age limit, only the size limit.", ge=0)
    ]
    on_full: Annotated[
        Literal["refuse", "drop-oldest"],
        doc(
            "`refuse`: stored messages remain, and publishing fails while the stream is full. "
            "`drop-oldest`: publishing succeeds, and the oldest messages are deleted. Both raise an "
            "alert and increment a counter."
        ),
    ] = "drop-oldest"


def _budget(
    max_bytes: int, max_age_s: float, on_full: Literal["refuse", "drop-oldest"] = "drop-oldest"
) -> RetentionBudget:
    budget: RetentionBudget = msgspec.field(
        default_factory=lambda: RetentionBudget(max_bytes=max_bytes, max_age_s=max_age_s, on_full=on_full)
    )
    return budget


def report_bytes(machines: int, period_s: float, hours: float) -> int:
    """Space for the reports of so many machines, with a tenth for bursts."""
    return int(1.1 * machines * hours * 3600 / period_s * REPORT_BYTES)


class RetentionSettings(sections.SettingsSection, frozen=True, kw_only=True):
    """A budget for every kind of stream, log and file. Streams reserve theirs on each broker's disk."""

    alert_at: Annotated[
        sections.Fraction,
        doc(
            "A budget used beyond this share raises an alert. Lower gives more time to act, and more false "
            "alarms."
        ),
    ] = 0.85
    machines: Annotated[
        int,
        doc(
            "Machines of the expected fleet. The stream `reports` is made large enough for their reports of "
            "`report_hours`, about 350 bytes each. 0: it has exactly `reports.max_bytes`, which is nine "
            "minutes for a million machines with few metrics.",
            ge=0,
        ),
    ] = 0
    report_hours: Annotated[
        float,
        doc(
            "How long the pipeline may be down without losing reports. `muster doctor` compares it with "
            "what the stream holds at the rate of the moment.",
            gt=0,
            le=24 * 30,
        ),
    ] = 4.0
    report_period_s: Annotated[
        float, doc("Between two reports of a machine of the expected fleet.", gt=0, le=86400)
    ] = 10.0
    messages: Annotated[
        RetentionBudget,
        doc("Stream: persistent JMS messages, until every durable subscriber and queue has had them."),
    ] = _budget(4 * _GIB, 0.0, "refuse")
    events: Annotated[
        RetentionBudget, doc("Streams: durable notification events until acknowledged, and who gets them.")
    ] = _budget(_GIB, 0.0, "refuse")
    states: Annotated[RetentionBudget, doc("Stream: changes of receivers' models, states and policies.")] = (
        _budget(_GIB, 0.0, "refuse")
    )
    registry: Annotated[
        RetentionBudget,
        doc(
            "Stream: the records of the registry (resources, owners, states, secrets, rollouts, enrolment "
            "tokens). Up to two thirds of it can be current records; 100,000 resources have some 100 MB."
        ),
    ] = _budget(_GIB, 0.0, "refuse")
    contexts: Annotated[RetentionBudget, doc("Stream: the log of contexts and service entries.")] = _budget(
        _GIB, 0.0, "refuse"
    )
    reports: Annotated[
        RetentionBudget, doc("Stream: reports on their way to the pipeline; the history itself is files.")
    ] = _budget(4 * _GIB, _DAY_S)
    summaries: Annotated[
        RetentionBudget,
        doc('Stream: reports that channels with `interpreter = "merge"` made into summaries.'),
    ] = _budget(512 * _MIB, _DAY_S)
    system: Annotated[
        RetentionBudget, doc("Stream: the pipeline's latest reports of groups, zones and the system.")
    ] = _budget(256 * _MIB, 7 * _DAY_S)
    notifications: Annotated[RetentionBudget, doc("Stream: deliveries of events to receivers.")] = _budget(
        256 * _MIB, 30 * _DAY_S
    )
    alerts: Annotated[RetentionBudget, doc("Stream: alerts, raised and cleared.")] = _budget(
        256 * _MIB, 30 * _DAY_S
    )
    decisions: Annotated[RetentionBudget, doc("Stream: the audit: who decided or did what, and why.")] = (
        _budget(256 * _MIB, 365 * _DAY_S)
    )
    records: Annotated[
        RetentionBudget,
        doc("Each key/value bucket: leases and other small records under compare-and-set."),
    ] = _budget(64 * _MIB, 0.0, "refuse")
    topics: Annotated[
        RetentionBudget, doc("Stream: each durable topic that a user makes without naming a budget.")
    ] = _budget(_GIB, 7 * _DAY_S)
    history: Annotated[RetentionBudget, doc("Files: the tables of the pipeline's history.")] = _budget(
        50 * _GIB, 400 * _DAY_S
    )
    logs: Annotated[RetentionBudget, doc("Files: log files of every process of this machine together.")] = (
        _budget(256 * _MIB, 14 * _DAY_S)
    )

    def reports_sized(self) -> RetentionBudget:
        """The budget of the stream `reports`, for the expected fleet."""
        if not self.machines:
            return self.reports
        needed = report_bytes(self.machines, self.report_period_s, self.report_hours)
        budget = self.reports
        return msgspec.structs.replace(
            budget,
            max_bytes=max(budget.max_bytes, needed),
            max_age_s=budget.max_age_s and max(budget.max_age_s, self.report_hours * 3600),
        )

    def streams(self, message_logs: int = 1) -> dict[str, RetentionBudget]:
        """The budget of each stream and bucket of Muster's own, by its name on the broker. The logs of
        messages share theirs.
        """
        share = msgspec.structs.replace(self.messages, max_bytes=self.messages.max_bytes // message_logs)
        return {
            "messages": share,
            **{f"messages-{number}": share for number in range(1, message_logs)},
            "events": self.events,
            "matches": self.events,  # apart: acknowledgements need room when events have none
            "receivers": self.states,
            "notifications": self.notifications,
            "registry": self.registry,
            "contexts": self.contexts,
            "reports": self.reports_sized(),
            "summaries": self.summaries,
            "system": self.system,
            "alerts": self.alerts,
            "decisions": self.decisions,
            **{f"KV_{bucket}": self.records for bucket in ("leases", "monitor", "notify")},
        }

    def reserved_bytes(self) -> int:
        """Disk space that the streams of a domain with all components reserve on a broker."""
        return sum(budget.max_bytes for budget in self.streams().values())

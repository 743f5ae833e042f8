"""The sections ``channel`` and ``sensor`` of a domain's settings."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from muster.core.net import hosts
from muster.core.settings import sections

doc = sections.field_doc


class ChannelSettings(sections.SettingsSection, frozen=True, kw_only=True):
    """A channel. Further ones, and those of other machines, run as `muster run channel`."""

    enabled: Annotated[bool, doc("Whether this machine runs one. Needs the extra `monitor`.")] = False
    name: Annotated[
        str,
        doc(
            "Its identity, by which sensors and other channels know it. The default is `channel-NAME` if "
            "`manage.agent_name` is another NAME than `local`."
        ),
    ] = "channel"
    parents: Annotated[
        tuple[str, ...],
        doc("Channels to forward to, the first that lives. None: the stream `reports`, which Spark reads."),
    ] = ()
    hold_s: Annotated[
        float,
        doc(
            "How long to hold reports. Every level adds its own to the age of what is seen; short ones cost "
            "more and smaller messages.",
            gt=0,
            le=3600,
        ),
    ] = 1.0
    beat_s: Annotated[
        float,
        doc(
            "Between two signs of life. A channel silent for two and a half is left by its children: at most "
            "0.4 of the sensors' period, so that they move within two.",
            gt=0,
            le=3600,
        ),
    ] = 1.0
    interpreter: Annotated[
        str, doc("`concat`: all detail, in columns. `merge`: summaries of groups. Or module:attribute.")
    ] = "concat"
    where: Annotated[str, doc("A predicate: only reports of which it is true are forwarded.")] = ""
    sensors: Annotated[bool, doc("Whether it takes sensors that choose their channel by themselves.")] = True
    compression: Annotated[
        Literal["none", "lz4", "zstd"],
        doc("Of what it forwards: zstd is smaller, and costs more CPU."),
    ] = "lz4"


class SensorSettings(sections.SettingsSection, frozen=True, kw_only=True):
    """The sensor of this machine. Other machines run `muster run sensor`."""

    enabled: Annotated[bool, doc("Whether to report this machine. Needs the extra `monitor`.")] = False
    name: Annotated[
        str,
        doc(
            "Its identity, and the machine's name in reports. The default is `sensor-NAME` if "
            "`manage.agent_name` is another NAME than `local`."
        ),
    ] = "sensor"
    group: Annotated[str, doc("Group of the machine.")] = "default"
    zone: Annotated[str, doc("Machines of a zone tend to fail together.")] = "default"
    period_s: Annotated[
        float, doc("Between two reports. It is the heartbeat: silence is noticed after two.", gt=0, le=86400)
    ] = 10.0
    channels: Annotated[tuple[str, ...], doc("Channels in order of preference. None: any it hears.")] = ()
    processes: Annotated[
        tuple[str, ...], doc("Services to watch, as NAME=TEXT, where TEXT is part of the command line.")
    ] = ()
    scrape: Annotated[tuple[str, ...], doc("Services to scrape, as NAME=URL of their OpenMetrics page.")] = ()
    intake: Annotated[bool, doc("Whether applications may push to it, by HTTP and statsd on loopback.")] = (
        True
    )
    http_port: Annotated[hosts.Port, doc("For service reports and OTLP. 0: a free one.")] = 9125
    statsd_port: Annotated[hosts.Port, doc("For statsd, by UDP. 0: a free one.")] = 8125
    buffer_bytes: Annotated[
        int, doc("For reports made while cut off; the oldest go when it is full.", ge=1 << 16)
    ] = 16 << 20

    def __post_init__(self) -> None:
        for entry in (*self.processes, *self.scrape):
            named(entry)


def named(text: str) -> tuple[str, str]:
    """``NAME=VALUE`` as a pair."""
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise msgspec.ValidationError(f"{text[:60]!r} is not NAME=VALUE")
    return name, value

"""Monitoring as components of a domain: a channel, and the sensor of its machine."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from muster.app.components import component
from muster.app.components import context as context_
from muster.core import errors, health, units
from muster.monitor import settings
from muster.trust.permissions import roles

if TYPE_CHECKING:
    from muster.bus import api
    from muster.monitor.channel import channel
    from muster.monitor.sensor import sensor


class ChannelComponent:
    name = "channel"
    depends_on: Sequence[str] = ()
    vital = False  # another channel can take over its children

    def __init__(
        self, channel_settings: settings.ChannelSettings, suffix: str = "", *, identity: str = ""
    ) -> None:
        """``suffix`` distinguishes its default name from those of channels of other machines. ``identity``:
        in place of the name in the settings."""
        self._settings = channel_settings
        self.identity = identity or _unique(channel_settings.name, self.name, suffix)
        self._bus: api.Bus | None = None
        self._channel: channel.Channel | None = None

    async def start(self, context: context_.ComponentContext) -> None:
        await _need("pyarrow")
        from muster.monitor import protocol
        from muster.monitor.channel import channel, interpreters

        options, reports = self._settings, context.settings.retention.reports_sized()
        to = interpreters.ForwardTarget(
            "up", options.parents or (protocol.ROOT,), interpreter=options.interpreter, where=options.where
        )
        self._bus = await context.connect(self.identity, roles.Role.CHANNEL)
        self._channel = channel.Channel(
            self._bus,
            channel.ChannelOptions(
                hold_s=options.hold_s,
                beat_s=options.beat_s,
                subscriptions=(to,),
                compression=None if options.compression == "none" else options.compression,
                sensors=options.sensors,
                stream_bytes_max=reports.max_bytes,
                stream_age_s_max=reports.max_age_s,
                replicas=context.settings.bus.replicas,
            ),
            measure=context.metrics,
        )
        await self._channel.start()

    async def stop(self) -> None:
        if self._channel is not None:
            await self._channel.stop()
            self._channel = None
        if self._bus is not None:
            await self._bus.close()

    def health(self) -> component.ComponentHealth:
        assert self._channel is not None
        behind_s = self._channel.waiting_s
        if behind_s > 10 * self._settings.hold_s + 10:
            return component.ComponentHealth(
                health.HealthState.LATE,
                f"reports have waited {units.rounded_duration(round(behind_s))} to be forwarded",
            )
        return component.ComponentHealth()


class SensorComponent:
    name = "sensor"
    depends_on: Sequence[str] = ()
    vital = False

    def __init__(
        self, sensor_settings: settings.SensorSettings, suffix: str = "", *, identity: str = ""
    ) -> None:
        """``suffix`` distinguishes its default name: two machines with one name would be one in reports.
        ``identity``: in place of the name in the settings."""
        self._settings = sensor_settings
        self._suffix = suffix
        self.identity = identity or _unique(sensor_settings.name, self.name, suffix)
        self._bus: api.Bus | None = None
        self._sensor: sensor.Sensor | None = None

    async def start(self, context: context_.ComponentContext) -> None:
        await _need("psutil")
        from muster.monitor.sensor import sensor

        options = self._settings
        self._bus = await context.connect(self.identity, roles.Role.AGENT)
        buffer_dir = context.folder.root / "sensor"
        if self._bus.identity != _unique(options.name, self.name, self._suffix):  # beside that of the domain
            buffer_dir /= self._bus.identity
        context.watch_folder("sensor's buffer", buffer_dir, options.buffer_bytes)
        self._sensor = sensor.Sensor(self._bus, options, buffer_dir)
        await self._sensor.start()

    async def stop(self) -> None:
        if self._sensor is not None:
            await self._sensor.stop()
            self._sensor = None
        if self._bus is not None:
            await self._bus.close()

    def health(self) -> component.ComponentHealth:
        assert self._sensor is not None
        if (waiting := self._sensor.buffered) > 1:  # the newest may be on its way
            return component.ComponentHealth(health.HealthState.LATE, f"{waiting} reports wait for a channel")
        return component.ComponentHealth()


def _unique(name: str, default: str, suffix: str) -> str:
    return f"{name}{suffix}" if name == default else name


async def _need(package: str) -> None:
    try:
        await asyncio.to_thread(importlib.import_module, package)
    except ImportError as error:
        raise errors.MissingDependency(
            f"{package} is not installed", hint="pip install 'muster-fabric[monitor]'"
        ) from error

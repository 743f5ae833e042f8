"""The components that the settings of a domain enable.

A service is part of a domain as a `muster.app.components.component.Component`: it declares its name, its
dependencies and whether it is vital, and receives a `muster.app.components.context.ComponentContext` at its
start. Its section is a field of `muster.app.settings.Settings`: ``[section] enabled = …`` decides whether it
runs here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from muster.app import settings as app_settings
from muster.app.components import (
    component,
    dispatcher,
    information_nodes,
    loop,
    management,
    monitor,
    notifier,
    pipeline,
    web,
)
from muster.app.export import otlp_activities, syslog_export
from muster.app.gateways import amqp, soap
from muster.app.supervisor import component_config
from muster.core import errors
from muster.inform import settings as inform_settings
from muster.monitor import settings as monitor_settings

#: From the settings to a component, or None if the settings do not enable it on this machine.
Factory = Callable[[app_settings.Settings], component.Component | None]

FACTORIES: Sequence[Factory] = (
    lambda settings: (
        information_nodes.InformationNodesComponent(
            _with_sensor(settings.inform, settings.sensor), settings.manage.machine_suffix
        )
        if settings.inform.enabled
        else None
    ),
    lambda settings: (
        management.ManagementComponent(
            settings.manage,
            monitor.SensorComponent(settings.sensor, settings.manage.machine_suffix).identity,
        )
        if settings.manage.enabled
        else None
    ),
    lambda settings: (
        dispatcher.DispatcherComponent(settings.message, more_processes=True)
        if settings.message.enabled
        else None
    ),
    lambda settings: (
        monitor.ChannelComponent(settings.channel, settings.manage.machine_suffix)
        if settings.channel.enabled
        else None
    ),
    lambda settings: (
        monitor.SensorComponent(settings.sensor, settings.manage.machine_suffix)
        if settings.sensor.enabled
        else None
    ),
    lambda settings: (
        notifier.NotifierComponent(settings.notify, settings.manage.machine_suffix)
        if settings.notify.enabled
        else None
    ),
    lambda settings: pipeline.supervised_pipeline(settings) if settings.pipeline.enabled else None,
    lambda settings: loop.ResponderComponent(settings.responder) if settings.responder.rules else None,
    lambda settings: (
        loop.ReactionComponent(settings.reactions)
        if loop.reactions_are_due(settings.reactions, settings.domain.folder)
        and (settings.notify.enabled or settings.reactions.rules)
        else None
    ),
    lambda settings: syslog_export.SyslogComponent(settings.syslog) if settings.syslog.url else None,
    lambda settings: (
        otlp_activities.OtlpActivities(settings.health.otlp_url)
        if settings.health.otlp_url and "activities" in settings.health.otlp_signals
        else None
    ),
    lambda settings: amqp.supervised_amqp(settings) if settings.amqp.enabled else None,
    lambda settings: soap.supervised_soap(settings.soap) if settings.soap.enabled else None,
    lambda settings: web.supervised_web(settings) if settings.web.enabled else None,
)


def _with_sensor(
    inform: inform_settings.InformSettings, sensor: monitor_settings.SensorSettings
) -> inform_settings.InformSettings:
    """Information nodes report reads to the sensor of the same domain, unless another one is named."""
    takes = sensor.enabled and sensor.intake and sensor.http_port
    if inform.sensor or not takes:
        return inform
    return msgspec.structs.replace(inform, sensor=f"http://127.0.0.1:{sensor.http_port}")


def components(settings: app_settings.Settings) -> list[component.Component]:
    """All components that these settings enable."""
    return [made for factory in FACTORIES if (made := factory(settings)) is not None]


#: What a process of its own runs, by the name of the component.
SERVING: Mapping[str, Callable[[component_config.ComponentConfig], component.Component]] = {
    "amqp": lambda config: amqp.serving(config.settings, inherits=config.listener is not None),
    "channel": lambda config: monitor.ChannelComponent(
        config.settings.channel, config.settings.manage.machine_suffix, identity=config.identity
    ),
    "inform": lambda config: information_nodes.InformationNodesComponent(
        _with_sensor(config.settings.inform, config.settings.sensor), identity=config.name
    ),
    "message": lambda config: dispatcher.DispatcherComponent(config.settings.message),
    "notify": lambda config: notifier.NotifierComponent(
        config.settings.notify, config.settings.manage.machine_suffix, identity=config.identity
    ),
    "pipeline": lambda config: pipeline.PipelineComponent(config.settings, config.identity),
    "sensor": lambda config: monitor.SensorComponent(
        config.settings.sensor, config.settings.manage.machine_suffix, identity=config.identity
    ),
    "soap": lambda config: soap.SoapComponent(config.settings.soap),
    "web": lambda config: web.WebComponent(config.settings),
}


def serving(config: component_config.ComponentConfig) -> component.Component:
    if config.component not in SERVING:
        raise errors.InvalidInput(f"{config.component!r} is not one of {', '.join(SERVING)}")
    return SERVING[config.component](config)

"""What a domain can run: the table in which each service has its line.

A service comes to a domain as a `muster.app.components.component.Component`: it names itself, what it depends
on and whether the domain can do without it, and is handed a `muster.app.components.context.ComponentContext`
when it starts. Its section of the settings is a field of `Settings`; ``[section] enabled = …`` decides
whether it runs here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from muster.app.components import (
    component,
    dispatcher,
    information_nodes,
    management,
    monitor,
    notifier,
    pipeline,
    soap_gateways,
    web,
)
from muster.app.policy import responder
from muster.app.supervisor import domain_tree
from muster.core.settings import domain
from muster.gateways.soap import settings as soap_settings
from muster.inform import settings as inform_settings
from muster.manage import settings as manage_settings
from muster.message import settings as message_settings
from muster.monitor import settings as monitor_settings
from muster.notify import settings as notify_settings
from muster.pipeline import settings as pipeline_settings
from muster.web import settings as web_settings


class Settings(domain.BaseSettings, frozen=True, kw_only=True):
    """The whole of a domain's settings: the ground every process shares, and a section for each service."""

    manage: manage_settings.ManageSettings = manage_settings.ManageSettings()
    channel: monitor_settings.ChannelSettings = monitor_settings.ChannelSettings()
    sensor: monitor_settings.SensorSettings = monitor_settings.SensorSettings()
    notify: notify_settings.NotifySettings = notify_settings.NotifySettings()
    inform: inform_settings.InformSettings = inform_settings.InformSettings()
    message: message_settings.MessageSettings = message_settings.MessageSettings()
    pipeline: pipeline_settings.PipelineSettings = pipeline_settings.PipelineSettings()
    responder: responder.Responder = responder.Responder()
    soap: soap_settings.SoapSettings = soap_settings.SoapSettings()
    web: web_settings.WebSettings = web_settings.WebSettings()


#: From the settings to a part, or None where the settings do not want it on this machine.
Factory = Callable[[Settings], component.Component | None]

FACTORIES: Sequence[Factory] = (
    lambda wanted: (
        information_nodes.InformationNodesComponent(wanted.inform) if wanted.inform.enabled else None
    ),
    lambda wanted: management.ManagementComponent(wanted.manage) if wanted.manage.enabled else None,
    lambda wanted: domain_tree.ParentNode(wanted.manage) if wanted.manage.children else None,
    lambda wanted: domain_tree.ChildNode(wanted.manage) if wanted.manage.parent else None,
    lambda wanted: dispatcher.DispatcherComponent(wanted.message) if wanted.message.enabled else None,
    lambda wanted: monitor.ChannelComponent(wanted.channel) if wanted.channel.enabled else None,
    lambda wanted: monitor.SensorComponent(wanted.sensor) if wanted.sensor.enabled else None,
    lambda wanted: notifier.NotifierComponent(wanted.notify) if wanted.notify.enabled else None,
    lambda wanted: pipeline.PipelineComponent(wanted.pipeline) if wanted.pipeline.enabled else None,
    lambda wanted: responder.ResponderComponent(wanted.responder) if wanted.responder.rules else None,
    lambda wanted: soap_gateways.SoapComponent(wanted) if wanted.soap.enabled else None,
    lambda wanted: web.WebComponent(wanted) if wanted.web.enabled else None,
)


def components(settings: Settings) -> list[component.Component]:
    """Every part that these settings want."""
    return [part for factory in FACTORIES if (part := factory(settings)) is not None]

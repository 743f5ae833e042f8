"""What a domain can run: the table in which each service has its line.

A service comes to a domain as a `muster.app.components.component.Part`: it names itself, what it depends on and whether the
domain can do without it, and is handed a `muster.app.components.context.Context` when it starts.  Its section of the
settings is a field of `Settings`; ``[section] enabled = …`` decides whether it runs here.
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


class Settings(domain.Ground, frozen=True, kw_only=True):
    """The whole of a domain's settings: the ground every process shares, and a section for each service."""

    manage: manage_settings.Manage = manage_settings.Manage()
    channel: monitor_settings.Channel = monitor_settings.Channel()
    sensor: monitor_settings.Sensor = monitor_settings.Sensor()
    notify: notify_settings.Notify = notify_settings.Notify()
    inform: inform_settings.Inform = inform_settings.Inform()
    message: message_settings.Message = message_settings.Message()
    pipeline: pipeline_settings.Pipeline = pipeline_settings.Pipeline()
    responder: responder.Responder = responder.Responder()
    soap: soap_settings.Soap = soap_settings.Soap()
    web: web_settings.Web = web_settings.Web()


#: From the settings to a part, or None where the settings do not want it on this machine.
Factory = Callable[[Settings], component.Part | None]

FACTORIES: Sequence[Factory] = (
    lambda wanted: information_nodes.InformationNodes(wanted.inform) if wanted.inform.enabled else None,
    lambda wanted: management.Manage(wanted.manage) if wanted.manage.enabled else None,
    lambda wanted: domain_tree.Passive(wanted.manage) if wanted.manage.children else None,
    lambda wanted: domain_tree.Child(wanted.manage) if wanted.manage.parent else None,
    lambda wanted: dispatcher.Dispatcher(wanted.message) if wanted.message.enabled else None,
    lambda wanted: monitor.Channel(wanted.channel) if wanted.channel.enabled else None,
    lambda wanted: monitor.Sensor(wanted.sensor) if wanted.sensor.enabled else None,
    lambda wanted: notifier.Notifier(wanted.notify) if wanted.notify.enabled else None,
    lambda wanted: pipeline.PipelinePart(wanted.pipeline) if wanted.pipeline.enabled else None,
    lambda wanted: responder.ResponderPart(wanted.responder) if wanted.responder.rules else None,
    lambda wanted: soap_gateways.SoapPart(wanted) if wanted.soap.enabled else None,
    lambda wanted: web.WebPart(wanted) if wanted.web.enabled else None,
)


def parts(settings: Settings) -> list[component.Part]:
    """Every part that these settings want."""
    return [part for factory in FACTORIES if (part := factory(settings)) is not None]

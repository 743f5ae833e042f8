"""The settings of a domain: the base settings of every process, and a section for each service.

A command reads them without loading the services; `muster.app.components.factories` makes the components that
they enable.
"""

from __future__ import annotations

from muster.app.export import settings as export_settings
from muster.core.settings import domain
from muster.gateways.amqp import settings as amqp_settings
from muster.gateways.soap import settings as soap_settings
from muster.inform import settings as inform_settings
from muster.loop import settings as loop_settings
from muster.manage import settings as manage_settings
from muster.message import settings as message_settings
from muster.monitor import settings as monitor_settings
from muster.notify import settings as notify_settings
from muster.pipeline import settings as pipeline_settings
from muster.web import settings as web_settings


class Settings(domain.BaseSettings, frozen=True, kw_only=True):
    """All settings of a domain: the base settings of every process, and a section for each service."""

    manage: manage_settings.ManageSettings = manage_settings.ManageSettings()
    channel: monitor_settings.ChannelSettings = monitor_settings.ChannelSettings()
    sensor: monitor_settings.SensorSettings = monitor_settings.SensorSettings()
    notify: notify_settings.NotifySettings = notify_settings.NotifySettings()
    inform: inform_settings.InformSettings = inform_settings.InformSettings()
    message: message_settings.MessageSettings = message_settings.MessageSettings()
    pipeline: pipeline_settings.PipelineSettings = pipeline_settings.PipelineSettings()
    responder: loop_settings.ResponderSettings = loop_settings.ResponderSettings()
    reactions: loop_settings.ReactionSettings = loop_settings.ReactionSettings()
    syslog: export_settings.SyslogSettings = export_settings.SyslogSettings()
    amqp: amqp_settings.AmqpSettings = amqp_settings.AmqpSettings()
    soap: soap_settings.SoapSettings = soap_settings.SoapSettings()
    web: web_settings.WebSettings = web_settings.WebSettings()

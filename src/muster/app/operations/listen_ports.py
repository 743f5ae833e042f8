"""The ports that a domain listens on by its settings, and whether they are free."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from muster.app import settings as app_settings
from muster.app.brokers import broker_configs
from muster.core.net import hosts


def configured(settings: app_settings.Settings) -> Iterator[tuple[str, int]]:
    bus = settings.bus
    if not bus.servers:
        for first in (bus.port, bus.websocket_port if bus.websocket else 0, bus.mqtt_port if bus.mqtt else 0):
            if first:
                yield from (
                    (bus.host, first + number) for number in range(broker_configs.broker_count(settings))
                )
    if bus.locator and bus.locator_port:
        yield bus.host, bus.locator_port
    web = settings.web
    # On loopback, the web server uses a free port instead.
    if web.enabled and web.port and not hosts.is_loopback(web.host):
        yield web.host, web.port
    if settings.amqp.enabled and settings.amqp.port and not settings.amqp.share_port:
        yield settings.amqp.host, settings.amqp.port
    if settings.soap.enabled and settings.soap.port:
        yield settings.soap.host, settings.soap.port
    if settings.health.enabled and settings.health.port:
        yield settings.health.host, settings.health.port


def is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True

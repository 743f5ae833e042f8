"""The AMQP gateway as a component.

Clients log in with a name and password of the domain; each identity has its own bus connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from muster.app import settings as app_settings
from muster.app.components import component, dispatcher, supervised
from muster.app.components import context as context_
from muster.app.operations import audit
from muster.app.supervisor import endpoints
from muster.bus import api
from muster.core import errors
from muster.core.net import tls
from muster.gateways.amqp import settings
from muster.trust import certificates
from muster.trust.login import password_checker, passwords

if TYPE_CHECKING:
    from muster.gateways.amqp import gateway


class AmqpComponent:
    """The gateway itself, in any process."""

    name = "amqp"
    depends_on: Sequence[str] = ()
    vital = False

    def __init__(self, all_settings: app_settings.Settings) -> None:
        self._settings = all_settings.amqp
        self._message = all_settings.message
        self._stack = contextlib.AsyncExitStack()
        self._listener: socket.socket | None = None
        self._gateway: gateway.AmqpGateway

    @property
    def url(self) -> str:
        return "" if self._listener is None else endpoint(self._settings).url(self._listener)

    async def start(self, context: context_.ComponentContext) -> None:
        check(self._settings)
        from muster.gateways.amqp import gateway

        connect_as = context.access.connect_login

        async def connect(login: passwords.PasswordLogin) -> api.Bus:
            return await connect_as(login.name, login.role)

        tls_context = None
        if self._settings.certificate:
            files = self._settings.certificate, self._settings.key or None
            tls_context = await asyncio.to_thread(tls.for_server, *files)
            served = tls.RenewableTls(tls_context, *files)
            context.tasks.loop("certificate", functools.partial(certificates.keep_current, served))
        self._listener = await asyncio.to_thread(context.listen, endpoint(self._settings))
        self._stack.callback(self._listener.close)
        failed = await self._stack.enter_async_context(audit.FailedLogins(context.folder.root, self.name))
        self._gateway = await self._stack.enter_async_context(
            gateway.AmqpGateway(
                connect,
                password_checker.PasswordChecker(context.trust.passwords(), on_failure=failed),
                anonymous=self._settings.anonymous or None,
                listener=self._listener,
                tls=tls_context,
                may=dispatcher.TopicPermissions(context.trust),
                per_address_max=self._settings.connections_per_address or None,
                message_settings=self._message,
                measure=context.metrics,
            )
        )
        connected = context.metrics.gauge("amqp_connections", "Number of connected clients.")
        connected.read_from(lambda: float(len(self._gateway.connections)))

    async def stop(self) -> None:
        await self._stack.aclose()

    def health(self) -> component.ComponentHealth:
        return component.ComponentHealth(facts=_facts(self.url, 1))


def serving(all_settings: app_settings.Settings, *, inherits: bool) -> component.Component:
    """``inherits``: the process has the socket of another one, so it serves in any case."""
    count = all_settings.amqp.process_count(endpoints.usable_cores())
    return AmqpComponent(all_settings) if inherits or count == 1 else supervised_amqp(all_settings)


def supervised_amqp(all_settings: app_settings.Settings) -> supervised.SupervisedComponent:
    """With the domain: processes of their own."""
    amqp = all_settings.amqp
    count = amqp.process_count(endpoints.usable_cores())

    def sharing(port: int) -> app_settings.Settings:
        of_each = msgspec.structs.replace(amqp, port=port, processes=1, share_port=True)
        return msgspec.structs.replace(all_settings, amqp=of_each)

    return supervised.SupervisedComponent(
        supervised.Supervision(
            "amqp",
            check=lambda: check(amqp),
            prepare=_require_keys,
            endpoint=endpoint(amqp),
            facts=lambda url: _facts(url, count),
            processes=count,
            sharing=sharing,
        )
    )


def _require_keys(context: context_.ComponentContext) -> None:
    """Here rather than in each process: none of them would start without passwords to check."""
    _ = context.trust


def check(amqp: settings.AmqpSettings) -> None:
    """Raises `errors.Refused` if passwords would be sent unencrypted, or an error if a package is missing."""
    if importlib.util.find_spec("proton") is None:
        raise errors.MissingDependency(
            "the AMQP gateway needs python-qpid-proton, which is not installed",
            hint="pip install 'muster-fabric[amqp]'; where no wheel fits, that needs a C compiler",
        )
    endpoints.require_encryption(amqp.host, amqp.certificate, "amqp.certificate")


def endpoint(amqp: settings.AmqpSettings) -> endpoints.Endpoint:
    scheme = "amqps" if amqp.certificate else "amqp"
    return endpoints.Endpoint(scheme, amqp.host, amqp.port, shared=amqp.share_port)


def _facts(url: str, processes: int) -> dict[str, Any]:
    return {"amqp": {"url": url, "processes": processes}}

"""The SOAP doors as a part of a domain, or of a gateway beside one.

Whoever comes in logs in with a name and a password of the domain, and is connected to the bus as itself.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Sequence

from muster.app import context as context_
from muster.app import team, visitors
from muster.core import errors, health, metrics
from muster.inform import client as inform_client
from muster.inform import sessions
from muster.inform.uddi import ports, registry
from muster.inform.wscontext import desk as context_desk
from muster.manage import client as manage_client
from muster.manage.wsman import desk as wsman_desk
from muster.soap import asgi, door, settings
from muster.trust import logins, passwords

LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Doors:
    """All doors onto one bus: `application` to mount or to serve, `close` at the end."""

    def __init__(
        self,
        connect: visitors.Connect,
        known: passwords.Passwords,
        *,
        callbacks: Sequence[str] = (),
        measure: metrics.Metrics,
    ) -> None:
        self._visitors = visitors.Visitors(connect)
        self._logins = logins.Logins(known)
        self._wsman = wsman_desk.Desk(self._fleet, callbacks=callbacks, measure=measure)
        self._context = context_desk.Desk(self._activities, callbacks=callbacks, measure=measure)
        self._uddi = ports.Ports(
            registry.Registry(self._visitors.visit),
            self.authenticate,
            stands=self._logins.stands,
            measure=measure,
        )
        self.application = asgi.Application(
            {
                "/wsman": self._wsman.opened(self.authenticate),
                **self._context.doors(self.authenticate),
                **self._uddi.doors(),
            }
        )

    async def authenticate(self, name: str, password: str) -> door.Caller:
        login = await self._logins.check(name, password)
        return door.Caller(login.name, login.role.value)

    async def close(self) -> None:
        await self._wsman.close()
        await self._visitors.close()

    @contextlib.asynccontextmanager
    async def _fleet(self, caller: door.Caller) -> AsyncIterator[manage_client.Client]:
        async with self._visitors.visit(caller.name, caller.role) as bus:
            yield manage_client.Client(bus)

    @contextlib.asynccontextmanager
    async def _activities(self, caller: door.Caller) -> AsyncIterator[sessions.Sessions]:
        async with self._visitors.visit(caller.name, caller.role) as bus:
            yield sessions.Sessions(inform_client.Client(bus), time.time_ns)


@contextlib.asynccontextmanager
async def serving(doors: Doors, wanted: settings.Soap) -> AsyncIterator[str]:
    """The address at which the doors are served, for as long as this lasts."""
    try:
        from muster.soap import serving as serving_
    except ModuleNotFoundError as error:
        raise errors.MissingPart(
            "SOAP doors are served by uvicorn, which is not installed",
            hint="pip install 'muster-fabric[soap]'",
        ) from error
    if not wanted.certificate and wanted.host not in LOOPBACK:
        raise errors.Refused(
            f"passwords would cross the network in the clear on {wanted.host}",
            hint="give a certificate and its key",
        )
    server = serving_.Server(
        doors.application,
        host=wanted.host,
        port=wanted.port,
        certificate=wanted.certificate or None,
        key=wanted.key or None,
    )
    async with server:
        yield server.url


class SoapPart:
    name = "soap"
    depends_on: Sequence[str] = ()
    vital = False

    def __init__(self, wanted: settings.Soap) -> None:
        self._wanted = wanted
        self._stack = contextlib.AsyncExitStack()
        self.url = ""

    async def start(self, context: context_.Context) -> None:
        doors = Doors(
            context.connect,
            context.trust.passwords(),
            callbacks=self._wanted.callbacks,
            measure=context.metrics,
        )
        self._stack.push_async_callback(doors.close)
        self.url = await self._stack.enter_async_context(serving(doors, self._wanted))

    async def stop(self) -> None:
        await self._stack.aclose()

    def health(self) -> team.Health:
        if not self.url:
            return team.Health(health.State.STARTING)
        return team.Health(facts={"soap": [{"door": path, "url": f"{self.url}{path}"} for path in PATHS]})


PATHS = ("/wsman", "/context", "/contextmanager", "/uddi")

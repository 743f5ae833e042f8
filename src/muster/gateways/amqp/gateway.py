"""The AMQP gateway: listens, and creates a connection object for each client.

Connections are scheduled fairly. When it is scheduled, a connection passes a few topic messages to its links
and writes its output. If more is waiting, it is scheduled again, once per iteration of the event loop.
Clients can therefore read while the next connection produces its output, and a connection with few links does
not wait for one with many.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl
from collections import deque
from collections.abc import Coroutine
from typing import Any, Final

from muster.core import errors, lifecycle
from muster.core.net import connection_limits as net_connection_limits
from muster.core.telemetry import log, metrics
from muster.gateways.amqp import bus_connections, connection, memory_budget, read_schedule
from muster.gateways.amqp.protocol import sasl
from muster.message import settings
from muster.message.dispatcher import rights
from muster.supervision import tasks

events = log.EventLog("message")

CONNECTIONS_MAX: Final = 10_000
PER_ADDRESS_MAX: Final = 1000
PER_LOGIN_MAX: Final = 1000


class AmqpGateway(lifecycle.ServiceContext):
    """``anonymous``: the identity of clients that log in anonymously; None: they may not.

    ``may`` decides to which topics an identity may send, because the broker rejects messages without
    reporting it. A client that is silent for ``idle_s`` is considered lost. ``listener``: a listening socket,
    in place of ``host`` and ``port``.

    ``per_address_max`` and ``per_login_max`` limit the number of connections. Behind a proxy all clients have
    the same address; use None for the first. Every ``recheck_s`` the gateway checks whether the passwords of
    its clients are still valid, and closes the connections of the others.

    ``message_settings``: the size of messages, and the queues that exist, as the dispatcher has them.
    """

    def __init__(
        self,
        connect: bus_connections.Connect,
        verifiers: sasl.SaslVerifiers | None,
        *,
        anonymous: str | None = None,
        name: str = "muster",
        host: str = "127.0.0.1",
        port: int = 0,
        listener: socket.socket | None = None,
        tls: ssl.SSLContext | None = None,
        may: rights.May = rights.allow_all,
        idle_s: float = 30.0,
        connection_limits: memory_budget.GatewayLimits = memory_budget.CONNECTION,
        login_limits: memory_budget.GatewayLimits = memory_budget.LOGIN,
        per_address_max: int | None = PER_ADDRESS_MAX,
        per_login_max: int = PER_LOGIN_MAX,
        recheck_s: float = 5.0,
        message_settings: settings.MessageSettings | None = None,
        measure: metrics.Metrics | None = None,
    ) -> None:
        self.connect = connect
        self.shared_connections = bus_connections.SharedConnections(connect, self._run_due, self._bus_lost)
        self.verifiers = verifiers
        self.anonymous = anonymous
        self.may = may
        self.idle_s = idle_s
        self.name = name
        self.host = host
        self.port = port
        self._listener = listener
        self.connections: set[connection.AmqpConnection] = set()
        self._due: list[connection.AmqpConnection] = []  # scheduled connections
        self._unfinished: deque[connection.AmqpConnection] = deque()  # connections with more to process
        self._scheduled = False  # a run is scheduled
        self.read_schedule = read_schedule.ReadSchedule()
        self._connection_limits = connection_limits
        self._login_limits = login_limits
        self._budgets: dict[
            str, tuple[memory_budget.ConnectionBudget, set[memory_budget.ConnectionBudget]]
        ] = {}  # by login
        self._per_login_max = per_login_max
        self._admissions = net_connection_limits.ConnectionLimits(CONNECTIONS_MAX, per_address_max)
        measure = measure or metrics.Metrics()
        self._refused = measure.counter(
            "amqp_refused_connections", "Rejected connections of AMQP clients, by reason.", ("reason",)
        )
        self.dropped = measure.counter(
            "amqp_dropped_messages",
            "Messages of topics that links with a matching selector did not receive, by reason.",
            ("reason",),
        )
        self._recheck_s = recheck_s
        self._logins = tasks.TaskSupervisor("AMQP logins")
        common = message_settings or settings.MessageSettings()
        self.max_message_bytes = common.max_message_bytes
        self.check_exists = common.check_exists
        self._tls = tls
        self._server: asyncio.Server | None = None
        self.tasks = tasks.TaskSupervisor("AMQP gateway")

    def admit(self, client: connection.AmqpConnection, address: str) -> bool:
        """Whether one more connection from this address is allowed."""
        if self._admissions.add(client, address):
            self.connections.add(client)
            return True
        held = len(self._admissions)
        self._refused.add(reason="connections" if held >= CONNECTIONS_MAX else "address")
        events.info("connection-refused", address=address, connections=held)
        return False

    def forget(self, client: connection.AmqpConnection) -> None:
        self._admissions.discard(client)
        self.connections.discard(client)

    def check_login(self, login: str) -> None:
        """Raise `errors.LimitExceeded` if the login has too many connections."""
        _, parts = self._budgets[login]
        if len(parts) > self._per_login_max:
            self._refused.add(reason="login")
            events.info("connection-refused", login=login, connections=len(parts))
            raise errors.LimitExceeded(
                f"{login} has {self._per_login_max} connections to this gateway, the maximum"
            )

    async def _recheck(self, verifiers: sasl.SaslVerifiers) -> None:
        """Close the connections of logins whose password was changed or removed, or has expired."""
        while True:
            await asyncio.sleep(self._recheck_s)
            valid: dict[tuple[str, str], bool] = {}
            for client in list(self.connections):
                login = client.login
                if login is None or not login.verifier:  # anonymous
                    continue
                key = (login.name, login.verifier)
                if key not in valid:
                    try:
                        valid[key] = await verifiers.stands(login)
                    except errors.MusterError as error:  # unknown now, so the connection remains
                        events.warning("login-not-checked", login=login.name, error=error)
                        valid[key] = True
                if not valid[key]:
                    client.revoke_login()

    def open_budget(self, login: str) -> memory_budget.ConnectionBudget:
        """The memory budget for one more connection of this login."""
        if login not in self._budgets:
            self._budgets[login] = (memory_budget.ConnectionBudget(self._login_limits), set())
        shared, parts = self._budgets[login]

        def on_room() -> None:
            for part in list(parts):
                part.on_room()

        shared.on_room = on_room
        made = memory_budget.ConnectionBudget(self._connection_limits, shared)
        parts.add(made)
        return made

    def close_budget(self, login: str, part: memory_budget.ConnectionBudget) -> None:
        """Release the budget of a closed connection."""
        part.close()
        _, parts = self._budgets[login]
        parts.discard(part)
        if not parts:
            del self._budgets[login]

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.spawn("connection", work)

    def flush_soon(self, client: connection.AmqpConnection) -> None:
        self._due.append(client)
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._run_scheduled)

    def _run_scheduled(self) -> None:
        self._scheduled = False
        self._run_due()
        if self._unfinished:
            client = self._unfinished.popleft()
            if self._process_pending(client):
                self._unfinished.append(client)
            self._schedule()

    def _run_due(self) -> None:
        due, self._due = self._due, []
        self._unfinished += filter(self._process_pending, due)
        if self._unfinished:
            self._schedule()

    def _process_pending(self, client: connection.AmqpConnection) -> bool:
        """Whether more is waiting. An internal error ends this connection only."""
        try:
            return client.process_pending()
        except Exception as error:  # noqa: BLE001
            events.error("amqp-failed", error=error)
            client.abort()
            return False

    def _bus_lost(self, shared_connection: bus_connections.SharedConnection) -> None:
        """Abort the connections of its clients, which have to log in again."""
        for client in list(self.connections):
            if client.shared_connection is shared_connection:
                client.abort()

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        where: dict[str, Any] = {"host": self.host, "port": self.port}
        if self._listener is not None:
            where = {"sock": self._listener}
        self._server = await loop.create_server(
            lambda: connection.AmqpConnection(self), **where, ssl=self._tls
        )
        self.port = self._server.sockets[0].getsockname()[1]
        if self.verifiers is not None:
            self._logins.loop("recheck", functools.partial(self._recheck, self.verifiers))

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        await self._logins.close()
        for client in list(self.connections):
            await client.end(lost=True)
            client.abort()
        await self.tasks.wait_idle()

"""`muster.open_async`: one object for everything that a program does in a domain."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from muster.bus import api
from muster.client import (
    contexts,
    fleet,
    history,
    location,
    messages,
    notifications,
    queues,
    rows,
    services,
)
from muster.core import errors, lifecycle
from muster.manage.adapters import base, plugins
from muster.manage.agent import agent as agent_
from muster.message import destinations, listings, retries
from muster.message.client import api as jms
from muster.notify import models
from muster.supervision import tasks

if TYPE_CHECKING:
    from muster.client import monitor

T = TypeVar("T")
H = TypeVar("H", bound=Callable[..., Any])
M = TypeVar("M", bound=Callable[[services.HandlerCall], Any])
A = TypeVar("A", bound=type[base.Adapter])
REQUEST_TIMEOUT_S = 5.0
QUEUE = "queue:"


@contextlib.asynccontextmanager
async def open_async(
    server: str | None = None,
    *,
    home: str | Path | None = None,
    profile: str | None = None,
    locator: str | None = None,
    creds: str | Path | None = None,
    ca: str | Path | None = None,
) -> AsyncIterator[AsyncMuster]:
    """A connection to a domain, for programs with an event loop; see `muster.open` for the parameters.

    >>> async with muster.open_async() as m:
    ...     await m.publish("orders/eu", "17 boxes")
    """
    opened = await connect(server, home=home, profile=profile, locator=locator, creds=creds, ca=ca)
    async with opened as m:
        yield m


async def connect(
    server: str | None = None,
    *,
    home: str | Path | None = None,
    profile: str | None = None,
    locator: str | None = None,
    creds: str | Path | None = None,
    ca: str | Path | None = None,
) -> AsyncMuster:
    """As `open_async`; the caller closes the result."""
    chosen_home, chosen_profile = location.from_environment(home, profile)
    options = location.ConnectionOptions(
        (server,) if server else (), Path(creds) if creds else None, Path(ca) if ca else None, locator
    )
    place = None
    if options.names_server:
        target = await asyncio.to_thread(location.resolve, chosen_home, profile, options)
    else:
        place = await asyncio.to_thread(location.find_home, chosen_home, chosen_profile)
        target = await asyncio.to_thread(location.resolve, chosen_home, chosen_profile, options)
    return AsyncMuster(await location.connect(target), home=place.root if place is not None else None)


class AsyncMuster(lifecycle.ClosingContext):
    """A domain, as a program sees it. The parts are

    | `publish`, `subscribe`, `request`, `on` | messages of topics |
    | `queue`, `queues` | persistent messages |
    | `contexts` | metadata under keys |
    | `notify`, `receiver` | events to receivers selected by their state |
    | `fleet`, `adapter` | resources and their desired state |
    | `alerts`, `reports`, `history` | what sensors report, and what the pipeline makes of it |
    | `bus` | the connection itself, with streams and key/value buckets |
    """

    def __init__(self, bus: api.Bus, *, home: Path | None = None) -> None:
        self.bus = bus
        self.home = home  # of the domain, if it is on this machine
        self._stack = contextlib.AsyncExitStack()
        self._jms = queues.QueueConnector(bus, self._stack)
        self._publishing = asyncio.Lock()
        self._starting: list[asyncio.Task[None]] = []
        self._serving: set[asyncio.Task[None]] = set()
        self._middlewares: list[services.Middleware] = []
        self._adapters: dict[str, type[base.Adapter]] = {}
        self._adapting = asyncio.Lock()
        self._agent: agent_.Agent | None = None
        self._agent_bus: api.Bus | None = None
        self._stopped = asyncio.Event()
        self._failure: BaseException | None = None
        self.contexts = contexts.AsyncContexts(bus)
        self.notify = notifications.AsyncNotify(bus, self._stack)
        self.fleet = fleet.AsyncFleet(bus)
        self.history = history.AsyncHistory(home)

    @property
    def identity(self) -> str:
        """The identity that this program has in the domain."""
        return self.bus.identity

    @functools.cached_property
    def alerts(self) -> monitor.AsyncAlerts:
        from muster.client import monitor

        return monitor.AsyncAlerts(self.bus)

    @functools.cached_property
    def reports(self) -> monitor.AsyncReports:
        from muster.client import monitor

        return monitor.AsyncReports(self.bus)

    # Messages of topics

    async def publish(
        self,
        topic: str,
        content: messages.Content,
        *,
        headers: Mapping[str, str] | None = None,
        stream: str | None = None,
    ) -> int | None:
        """Publish a text, bytes, or a value that is sent as JSON; `errors.Forbidden` if it is refused.

        ``stream``: store it in this durable stream and return its sequence there.

        >>> await m.publish("orders/eu", "17 boxes")
        >>> await m.publish("orders/eu", {"boxes": 17}, headers={"kind": "order"})
        """
        await self._started()
        subject, data = messages.to_subject(topic), messages.encode(content)
        if stream is not None:
            opened = await self.bus.open_stream(stream)
            return await opened.publish(subject, data, headers=headers)
        async with self._publishing:  # so that a refusal is that of this message
            refused = self.bus.statistics().violations
            await self.bus.publish(subject, data, headers=headers)
            await self.bus.flush()
            if self.bus.statistics().violations > refused:
                raise errors.Forbidden(
                    f"{self.identity} may not publish to {topic}",
                    hint=f"`muster creds show {self.identity}` lists its permissions",
                )
        return None

    async def subscribe(
        self, topic: str, *, where: str | None = None, group: str | None = None
    ) -> messages.AsyncSubscription:
        """Receive the messages of a topic or a pattern of topics.

        ``where``: only messages whose headers and JSON fields match this predicate. ``group``: share the
        messages among the subscribers of this group.

        >>> async with await m.subscribe("orders/>") as orders:
        ...     await m.publish("orders/eu", "17 boxes")
        ...     order = await orders.next(timeout_s=10)
        >>> order
        Message('orders/eu', '17 boxes')
        """
        messages.warn_of_dots(topic)
        return await messages.AsyncSubscription.open(self.bus, topic, where=where, group=group)

    async def request(
        self,
        topic: str,
        content: messages.Content = "",
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> messages.PublishedMessage:
        """Send a request to a topic and return the reply; `errors.Unavailable` if there is no subscriber.

        If the handler fails, its error is raised here: a `muster.MusterError` as it is, and any other as a
        `MusterError` with the code ``handler-failed``.
        """
        await self._started()
        subject, data = messages.to_subject(topic), messages.encode(content)
        reply = await messages.request(self.bus, topic, subject, data, headers=headers, timeout_s=timeout_s)
        return messages.PublishedMessage(topic, reply.data, reply.headers, reply)

    async def reply(self, message: messages.PublishedMessage, content: messages.Content) -> None:
        """Reply to a received request."""
        if message.received is None:
            raise errors.InvalidInput("the message was not received from a topic")
        await message.received.respond(messages.encode(content))

    # Persistent messages

    def queue(self, name: str) -> queues.AsyncQueue:
        """The queue of this name; it exists as soon as a message is sent to it."""
        return queues.AsyncQueue(name, self._jms)

    async def queues(self) -> rows.Rows[listings.QueueRow]:
        """All queues, with the number of waiting messages."""
        return await self._jms.queues()

    def jms(self, client_id: str | None = None) -> jms.Connection:
        """A connection of JMS, for sessions, transactions, topics with durable subscriptions, and selectors.

        >>> async with m.jms() as connection:
        ...     session = connection.session()
        ...     await session.producer(session.queue("orders")).send("four chairs")
        """
        return jms.Connection(self.bus, client_id=client_id)

    # Services

    def on(
        self,
        topic: str,
        *,
        where: str | None = None,
        group: str | None = None,
        concurrency: int = 1,
        retry: retries.Retry | None = None,
    ) -> Callable[[H], H]:
        """Call the decorated function for each message of a topic, or of a queue (``queue:NAME``).

        Its parameter receives the message; annotated with `str`, `bytes`, or any other type, it receives the
        text, the data, or the JSON decoded as that type.  What it returns is the reply to a request; what it
        raises is logged and is the reply too, unless it is annotated ``-> None``.  If it raises for a message
        of a queue, the message is delivered again, by default after 1, 2, 4 … 60 seconds.

        ``concurrency``: messages that are handled at a time. ``retry``: delays and attempts for a queue.

        >>> @m.on("echo")
        ... async def echo(text: str) -> str:
        ...     return text.upper()
        >>> (await m.request("echo", "hello")).text
        'HELLO'
        """

        return self._decorator(
            self.serve, topic, where=where, group=group, concurrency=concurrency, retry=retry
        )

    def on_change(self, key: str, *, prefix: bool = False) -> Callable[[H], H]:
        """Call the decorated function for each change of a context from now on; with ``prefix``, of all
        contexts whose keys begin with ``key``.

        Its parameter receives the change; annotated with `str`, `bytes` or any other type, it receives the
        value, and None when the context is deleted.
        """
        return self._decorator(self.serve_changes, key, prefix=prefix)

    def middleware(self, around: M) -> M:
        """Call the decorated function around each call of a handler: a generator function with one ``yield``,
        or one that returns a context manager. Its parameter is a `muster.HandlerCall`.

            @m.middleware
            def logged(call):
                logging.info("%s begins, for a message of %s", call.handler, call.topic)
                yield
                logging.info("%s has ended", call.handler)
        """
        self._middlewares.append(services.middleware(around))
        return around

    def receiver(
        self,
        name: str | None = None,
        *,
        model: str,
        policy: str,
        state: models.State | None = None,
        durable: bool = False,
    ) -> Callable[[H], H]:
        """Register a receiver and call the decorated function for each event that its policy accepts.

        The receiver is called ``name`` or like the function.
        """

        return self._decorator(
            self.serve_events, name, model=model, policy=policy, state=state, durable=durable
        )

    def adapter(self, type_name: str, *, agent: str | None = None, zone: str = "default") -> Callable[[A], A]:
        """Manage resources of the type ``type_name`` with the decorated `muster.Adapter` class.

        This program becomes an agent. Its name, which manifests use, is the identity of this connection or
        ``agent``; a name of its own needs the domain's home on this machine.
        """

        return self._decorator(self.serve_adapter, type_name, agent=agent, zone=zone)

    def _decorator(
        self, serve: Callable[..., Coroutine[Any, Any, None]], *args: Any, **options: Any
    ) -> Callable[[T], T]:
        def decorate(handler: T) -> T:
            self._starting.append(asyncio.create_task(serve(handler, *args, **options)))
            return handler

        return decorate

    async def serve(
        self,
        handler: Callable[..., Any],
        topic: str,
        *,
        where: str | None = None,
        group: str | None = None,
        concurrency: int = 1,
        retry: retries.Retry | None = None,
    ) -> None:
        """As `on`, without a decorator; when this returns, no later message is missed."""
        caller = services.Caller(handler, self._middlewares)
        if concurrency < 1:
            raise errors.InvalidInput(f"concurrency is at least 1, not {concurrency}")
        if not topic.startswith(QUEUE):
            if retry is not None:
                raise errors.InvalidInput(
                    f"messages of the topic {topic} are not stored, so there is no retry",
                    hint="send them to a queue: queue:NAME",
                )
            subscription = await self.subscribe(topic, where=where, group=group)
            self._spawn(services.serve_topic(subscription, caller, concurrency))
            return
        if group is not None:
            raise errors.InvalidInput("a queue has no groups: its handlers share the messages")
        session = (await self._jms()).session()
        queue = destinations.queue(topic.removeprefix(QUEUE))
        consumer = await session.consumer(queue, where, prefetch=concurrency)
        self._spawn(services.serve_queue(consumer, caller, concurrency, retry or retries.Retry()))

    async def serve_changes(self, handler: Callable[..., Any], key: str, *, prefix: bool = False) -> None:
        """As `on_change`, without a decorator; when this returns, no later change is missed."""
        caller = services.Caller(handler, self._middlewares)
        position = await self.contexts.position()
        changes = self.contexts.watch(key, after_version=position, prefix=True)
        self._spawn(services.serve_changes(changes, caller, "" if prefix else key))

    async def serve_events(
        self,
        handler: Callable[..., Any],
        name: str | None = None,
        *,
        model: str,
        policy: str,
        state: models.State | None = None,
        durable: bool = False,
    ) -> None:
        """As `receiver`, without a decorator."""
        caller = services.Caller(handler, self._middlewares)
        receiver = await self.notify.join(
            name or services.name_of(handler), model, state, policy=policy, durable=durable
        )
        if not durable:
            self._stack.push_async_exit(receiver.__aexit__)
        self._spawn(services.serve_receiver(receiver._handle, caller))

    async def serve_adapter(
        self, adapter: type[base.Adapter], type_name: str, agent: str | None = None, zone: str = "default"
    ) -> None:
        """As `adapter`, without a decorator."""
        if not issubclass(adapter, base.Adapter):
            raise errors.InvalidInput(f"{adapter.__name__} is not a subclass of muster.Adapter")
        name = agent or self.identity
        async with self._adapting:  # one agent has all adapters
            if self._agent_bus is None:
                self._agent_bus = self.bus if name == self.identity else await self._connect_agent(name)
                self._stack.push_async_callback(self._stop_agent)
            elif self._agent_bus.identity != name:
                raise errors.InvalidInput(
                    f"this program is the agent {self._agent_bus.identity!r}, and cannot be {name!r} as well",
                    hint="give all adapters of a program the same `agent`",
                )
            adapter.type_name = type_name
            if not hasattr(adapter, "config_type"):
                adapter.config_type = dict  # type: ignore[assignment]  # any configuration
            plugins.register(type_name, adapter)
            self._stack.callback(plugins.unregister, type_name)
            self._adapters[type_name] = adapter
            await self._stop_agent()
            self._agent = agent_.Agent(
                self._agent_bus,
                zone=zone,
                adapters=self._adapters.__getitem__,
                types=tuple(self._adapters),
                clock=lambda: time.time(),  # looked up at each call: a test may replace it
            )
            await self._agent.start()

    async def run(self) -> None:
        """Wait until SIGINT, SIGTERM or `stop`; raises if a handler could not be started or has exited."""
        loop, numbers = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)
        for number in numbers:
            loop.add_signal_handler(number, self.stop)
        try:
            await self.wait_stopped()
        except services.HandlerExit as error:
            raise SystemExit(error.code) from error
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    async def wait_stopped(self) -> None:
        """As `run`, without the signals."""
        await self._started()
        await self._stopped.wait()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """End `run`."""
        self._stopped.set()

    # Lifecycle

    async def close(self) -> None:
        """Stop all handlers and close the connection."""
        self.stop()
        await tasks.finish(self._close())

    async def _close(self) -> None:
        for task in (*self._starting, *self._serving):
            task.cancel()
        await asyncio.gather(*self._starting, *self._serving, return_exceptions=True)
        await self._stack.aclose()
        await self.bus.close()

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if not name.startswith("_")]

    def __repr__(self) -> str:
        return f"<muster domain, connected as {self.identity}: {self.bus.state.value}>"

    async def _started(self) -> None:
        """Wait for the decorated handlers."""
        starting = tuple(self._starting)
        if starting:
            await asyncio.wait(starting)  # a caller that is cancelled does not cancel them
        for task in starting:
            if task in self._starting:
                self._starting.remove(task)
                task.result()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._serving.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._serving.discard(task)
        if not task.cancelled() and not self._stopped.is_set():
            self._failure = task.exception() or errors.NotConnected("the connection was closed")
            self._stopped.set()

    async def _stop_agent(self) -> None:
        if self._agent is not None:
            await self._agent.stop()

    async def _connect_agent(self, name: str) -> api.Bus:
        """A connection as the agent ``name``; issues its credentials with the keys of the home."""
        from muster.trust.permissions import roles

        if self.home is None:
            raise errors.InvalidInput(
                f"an agent called {name!r} needs credentials of its own",
                hint="connect with `creds` of this agent, or open the home of the domain",
            )
        bus = await location.connect_as(self.home, name, roles.Role.AGENT)
        self._stack.push_async_callback(bus.close)
        return bus

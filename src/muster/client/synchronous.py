"""`muster.open`: the objects of `muster.client.front` with blocking calls.

Behind them one thread runs an event loop with the connection, so that they work in programs without a loop,
in notebooks, which have a running one, and from several threads.  Each method is that of the other class.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

from muster import blocking_connection as blocking
from muster.client import contexts, fleet, front, history, messages, monitor, notifications, queues, services
from muster.core import errors
from muster.inform import protocol
from muster.manage import rows
from muster.message import messages as jms
from muster.message import retries
from muster.notify import client
from muster.notify import models as notify_models

COMPLETIONS_MAX = 1_000


@blocking.documented_as(contexts.AsyncContexts)
class Contexts(blocking.BlockingTwin[contexts.AsyncContexts]):
    get = blocking.sync(contexts.AsyncContexts.get)
    put = blocking.sync(contexts.AsyncContexts.put)
    delete = blocking.sync(contexts.AsyncContexts.delete)
    find = blocking.sync(contexts.AsyncContexts.find)
    keys = blocking.sync_iterator(contexts.AsyncContexts.keys)
    history = blocking.sync(contexts.AsyncContexts.history)
    watch = blocking.sync_iterator(contexts.AsyncContexts.watch)
    where = blocking.sync(contexts.AsyncContexts.where)

    def __getitem__(self, key: str) -> protocol.Context:
        """Read a context.

        >>> m.contexts["servers/web"] = "host-1"
        >>> m.contexts["servers/web"].text
        'host-1'
        >>> "servers/db" in m.contexts
        False
        >>> del m.contexts["servers/web"]
        """
        try:
            return self.get(key, max_staleness_s=0.0)
        except errors.NotFound as error:
            raise KeyError(key) from error

    def __setitem__(self, key: str, value: str | bytes) -> None:
        self.put(key, value)

    def __delitem__(self, key: str) -> None:
        try:
            self.delete(key)
        except errors.NotFound as error:
            raise KeyError(key) from error

    def __contains__(self, key: object) -> bool:
        try:
            self[str(key)]
        except KeyError:
            return False
        return True

    def __iter__(self) -> Iterator[str]:
        return self.keys()

    def _ipython_key_completions_(self) -> list[str]:
        return [context.key for context in self.find(limit=COMPLETIONS_MAX)]

    def __repr__(self) -> str:
        return "<the contexts of the domain>"


@blocking.documented_as(queues.AsyncQueue)
class Queue(blocking.BlockingTwin[queues.AsyncQueue]):
    send = blocking.sync(queues.AsyncQueue.send)
    receive = blocking.sync(queues.AsyncQueue.receive)
    messages = blocking.sync_iterator(queues.AsyncQueue.messages)
    browse = blocking.sync_iterator(queues.AsyncQueue.browse)
    depth = blocking.sync(queues.AsyncQueue.depth)
    scheduled = blocking.sync(queues.AsyncQueue.scheduled)
    cancel = blocking.sync(queues.AsyncQueue.cancel)

    @property
    def name(self) -> str:
        return self._async.name

    def __len__(self) -> int:
        return self.depth()

    def __bool__(self) -> bool:  # a queue is there, whether messages wait or not
        return True

    def __iter__(self) -> Iterator[jms.JmsMessage]:
        return self.messages()


@blocking.documented_as(notifications.AsyncReceiver)
class Receiver(blocking.BlockingTwin[notifications.AsyncReceiver]):
    update = blocking.sync(notifications.AsyncReceiver.update)
    policy = blocking.sync(notifications.AsyncReceiver.policy)
    next = blocking.sync(notifications.AsyncReceiver.next)
    leave = blocking.sync(notifications.AsyncReceiver.leave)

    @property
    def name(self) -> str:
        return self._async.name

    @property
    def id(self) -> str:
        return self._async.id

    def __iter__(self) -> Iterator[client.ReceivedEvent]:
        return self._loop.iterate(aiter(self._async))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.wait(self._async.__aexit__())


@blocking.documented_as(notifications.AsyncNotify)
class Notify(blocking.BlockingTwin[notifications.AsyncNotify]):
    send = blocking.sync(notifications.AsyncNotify.send)
    define = blocking.sync(notifications.AsyncNotify.define)
    define_event = blocking.sync(notifications.AsyncNotify.define_event)
    models = blocking.sync(notifications.AsyncNotify.models)
    receivers = blocking.sync(notifications.AsyncNotify.receivers)
    join = blocking.sync_twin(notifications.AsyncNotify.join, Receiver)


@blocking.documented_as(fleet.AsyncFleet)
class Fleet(blocking.BlockingTwin[fleet.AsyncFleet]):
    resources = blocking.sync(fleet.AsyncFleet.resources)
    describe = blocking.sync(fleet.AsyncFleet.describe)
    apply = blocking.sync(fleet.AsyncFleet.apply)
    plan = blocking.sync(fleet.AsyncFleet.plan)
    delete = blocking.sync(fleet.AsyncFleet.delete)
    execute = blocking.sync(fleet.AsyncFleet.execute)
    execute_many = blocking.sync(fleet.AsyncFleet.execute_many)
    operations = blocking.sync(fleet.AsyncFleet.operations)
    logs = blocking.sync(fleet.AsyncFleet.logs)
    follow_logs = blocking.sync_iterator(fleet.AsyncFleet.follow_logs)
    wait = blocking.sync(fleet.AsyncFleet.wait)
    watch = blocking.sync_iterator(fleet.AsyncFleet.watch)
    names = blocking.sync(fleet.AsyncFleet.names)
    agents = blocking.sync(fleet.AsyncFleet.agents)
    managers = blocking.sync(fleet.AsyncFleet.managers)

    def __getitem__(self, name: str) -> rows.ResourceDescription:
        """All details of a resource, as `describe`."""
        try:
            return self.describe(name)
        except errors.NotFound as error:
            raise KeyError(name) from error

    def _ipython_key_completions_(self) -> list[str]:
        return self.names()[:COMPLETIONS_MAX]


@blocking.documented_as(monitor.AsyncAlerts)
class Alerts(blocking.BlockingTwin[monitor.AsyncAlerts]):
    list = blocking.sync(monitor.AsyncAlerts.list)
    watch = blocking.sync_iterator(monitor.AsyncAlerts.watch)
    acknowledge = blocking.sync(monitor.AsyncAlerts.acknowledge)
    resolve = blocking.sync(monitor.AsyncAlerts.resolve)
    silence = blocking.sync(monitor.AsyncAlerts.silence)


@blocking.documented_as(monitor.AsyncReports)
class Reports(blocking.BlockingTwin[monitor.AsyncReports]):
    system = blocking.sync(monitor.AsyncReports.system)
    group = blocking.sync(monitor.AsyncReports.group)
    zone = blocking.sync(monitor.AsyncReports.zone)
    top = blocking.sync(monitor.AsyncReports.top)
    forget = blocking.sync(monitor.AsyncReports.forget)
    nodes = blocking.sync(monitor.AsyncReports.nodes)


@blocking.documented_as(history.AsyncHistory)
class History(blocking.BlockingTwin[history.AsyncHistory]):
    sql = blocking.sync(history.AsyncHistory.sql)
    search = blocking.sync(history.AsyncHistory.search)

    def at(self, root: str | Path) -> History:
        """The history in this folder or at this URL (``s3://…``)."""
        return History(self._async.at(root), self._loop)


@blocking.documented_as(messages.AsyncSubscription)
class TopicSubscription(blocking.BlockingTwin[messages.AsyncSubscription]):
    next = blocking.sync(messages.AsyncSubscription.next)
    close = blocking.sync(messages.AsyncSubscription.close)

    @property
    def topic(self) -> str:
        return self._async.topic

    def __iter__(self) -> Iterator[messages.PublishedMessage]:
        return self._loop.iterate(aiter(self._async))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@blocking.documented_as(front.AsyncMuster)
class Muster(blocking.BlockingTwin[front.AsyncMuster]):
    publish = blocking.sync(front.AsyncMuster.publish)
    request = blocking.sync(front.AsyncMuster.request)
    reply = blocking.sync(front.AsyncMuster.reply)
    queues = blocking.sync(front.AsyncMuster.queues)
    subscribe = blocking.sync_twin(front.AsyncMuster.subscribe, TopicSubscription)

    def __init__(self, asynchronous: front.AsyncMuster, loop: blocking.EventLoopThread) -> None:
        super().__init__(asynchronous, loop)
        self.bus = blocking.BlockingBus(asynchronous.bus, loop)
        self.contexts = Contexts(asynchronous.contexts, loop)
        self.notify = Notify(asynchronous.notify, loop)
        self.fleet = Fleet(asynchronous.fleet, loop)
        self.alerts = Alerts(asynchronous.alerts, loop)
        self.reports = Reports(asynchronous.reports, loop)
        self.history = History(asynchronous.history, loop)

    @property
    def identity(self) -> str:
        """The identity that this program has in the domain."""
        return self._async.identity

    @property
    def home(self) -> Path | None:
        """The home of the domain, if it is on this machine."""
        return self._async.home

    def queue(self, name: str) -> Queue:
        """The queue of this name; it exists as soon as a message is sent to it."""
        return Queue(self._async.queue(name), self._loop)

    def on(
        self,
        topic: str,
        *,
        where: str | None = None,
        group: str | None = None,
        concurrency: int = 1,
        retry: retries.Retry | None = None,
    ) -> Callable[[front.H], front.H]:
        """Call the decorated function for each message of a topic, or of a queue (``queue:NAME``).

        Its parameter receives the message; annotated with `str`, `bytes`, or any other type, it receives the
        text, the data, or the JSON decoded as that type.  What it returns is the reply to a request; what it
        raises is logged and is the reply too, unless it is annotated ``-> None``.  If it raises for a message
        of a queue, the message is delivered again, by default after 1, 2, 4 … 60 seconds.

        ``concurrency``: messages that are handled at a time. ``retry``: delays and attempts for a queue.

        >>> @m.on("echo")
        ... def echo(text: str) -> str:
        ...     return text.upper()
        >>> m.request("echo", "hello").text
        'HELLO'
        """

        def decorate(handler: front.H) -> front.H:
            serving = self._async.serve(
                handler, topic, where=where, group=group, concurrency=concurrency, retry=retry
            )
            self._loop.wait(serving)
            return handler

        return decorate

    def middleware(self, around: front.M) -> front.M:
        """Call the decorated function around each call of a handler: a generator function with one ``yield``,
        or one that returns a context manager. Its parameter is a `muster.HandlerCall`. It may not block.

            @m.middleware
            def logged(call):
                logging.info("%s begins, for a message of %s", call.handler, call.topic)
                yield
                logging.info("%s has ended", call.handler)
        """
        return self._async.middleware(around)

    def receiver(
        self,
        name: str | None = None,
        *,
        model: str,
        policy: str,
        state: notify_models.State | None = None,
        durable: bool = False,
    ) -> Callable[[front.H], front.H]:
        """Register a receiver and call the decorated function for each event that its policy accepts.

        The receiver is called ``name`` or like the function.
        """

        def decorate(handler: front.H) -> front.H:
            self._loop.wait(self._async.serve_events(handler, name, model, state, policy, durable=durable))
            return handler

        return decorate

    def adapter(
        self, type_name: str, *, agent: str | None = None, zone: str = "default"
    ) -> Callable[[front.A], front.A]:
        """Manage resources of the type ``type_name`` with the decorated `muster.Adapter` class.

        This program becomes an agent. Its name, which manifests use, is the identity of this connection or
        ``agent``; a name of its own needs the domain's home on this machine.
        """

        def decorate(adapter: front.A) -> front.A:
            self._loop.wait(self._async.serve_adapter(adapter, type_name, agent, zone))
            return adapter

        return decorate

    def run(self) -> None:
        """Wait until SIGINT, SIGTERM or `stop`, while the decorated functions are called; raises SystemExit
        if one of them called `sys.exit`."""
        previous: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                previous[number] = signal.signal(number, lambda *_: self.stop())
        try:
            self._loop.wait(self._async.wait_stopped())
        except services.HandlerExit as error:
            raise SystemExit(error.code) from error
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def stop(self) -> None:
        """End `run`."""
        self._loop.call(self._async.stop)

    def close(self) -> None:
        """Stop all handlers and close the connection."""
        if not self._loop.is_stopped:
            self._loop.wait(self._async.close())
            self._loop.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open(
    server: str | None = None,
    *,
    home: str | Path | None = None,
    profile: str | None = None,
    locator: str | None = None,
    creds: str | Path | None = None,
    ca: str | Path | None = None,
) -> Muster:
    """Connect to a domain; without parameters to the one that the command line uses.

    >>> with muster.open() as m:
    ...     m.publish("orders/eu", "17 boxes")

    ``home``: the folder of a domain on this machine, as its administrator. ``profile``: a profile of this
    user (`muster profile`). ``server``: the URL of a broker, with ``creds``, the file of credentials, and
    ``ca``, the certificate authority. ``locator``: the URL of a locator, which names the best broker.
    Without these, MUSTER_PROFILE, MUSTER_HOME, the current profile, and the home in the current folder or the
    user's folder are tried, in this order.

    For programs with an event loop there is `muster.open_async`, with the same parameters.
    """
    loop = blocking.EventLoopThread()
    try:
        opened = front.connect(server, home=home, profile=profile, locator=locator, creds=creds, ca=ca)
        return Muster(loop.wait(opened), loop)
    except BaseException:
        loop.stop()
        raise

"""`muster.open`: the objects of `muster.client.front` with blocking calls.

Behind them one thread runs an event loop with the connection, so that they work in programs without a loop,
in notebooks, which have a running one, and from several threads.  Each method is that of the other class.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from muster import blocking_connection as blocking
from muster.client import contexts, fleet, front, history, messages, monitor, notifications, queues, services
from muster.core import errors
from muster.inform import protocol
from muster.manage import rows
from muster.message import destinations
from muster.message import messages as jms
from muster.message.client import api, consumers, producers
from muster.notify import client

COMPLETIONS_MAX = 1_000


@blocking.documented_as(contexts.AsyncContexts)
class Contexts(blocking.BlockingTwin[contexts.AsyncContexts]):
    get = blocking.sync(contexts.AsyncContexts.get)
    position = blocking.sync(contexts.AsyncContexts.position)
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
        """The name of the queue."""
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
    machine = blocking.sync(fleet.AsyncFleet.machine)
    apply = blocking.sync(fleet.AsyncFleet.apply)
    plan = blocking.sync(fleet.AsyncFleet.plan)
    delete = blocking.sync(fleet.AsyncFleet.delete)
    execute = blocking.sync(fleet.AsyncFleet.execute)
    execute_many = blocking.sync(fleet.AsyncFleet.execute_many)
    run_inside = blocking.sync(fleet.AsyncFleet.run_inside)
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
        return History(self._async.at(root), self._loop)


@blocking.documented_as(messages.AsyncSubscription)
class TopicSubscription(blocking.ClosingTwin[messages.AsyncSubscription]):
    next = blocking.sync(messages.AsyncSubscription.next)
    close = blocking.sync(messages.AsyncSubscription.close)

    @property
    def topic(self) -> str:
        """The topic or pattern, as it was given."""
        return self._async.topic

    def __iter__(self) -> Iterator[messages.PublishedMessage]:
        return self._loop.iterate(aiter(self._async))


@blocking.documented_as(consumers.Consumer)
class JmsConsumer(blocking.ClosingTwin[consumers.Consumer]):
    receive = blocking.sync(consumers.Consumer.receive)
    receive_nowait = blocking.sync(consumers.Consumer.receive_nowait)
    receive_body = blocking.sync(consumers.Consumer.receive_body)
    close = blocking.sync(consumers.Consumer.close)

    def __iter__(self) -> Iterator[jms.JmsMessage]:
        return self._loop.iterate(aiter(self._async))


@blocking.documented_as(producers.Producer)
class JmsProducer(blocking.BlockingTwin[producers.Producer]):
    send = blocking.sync(producers.Producer.send)  # type: ignore[arg-type]  # mypy: its options


@blocking.documented_as(api.Session)
class JmsSession(blocking.ClosingTwin[api.Session]):
    consumer = blocking.sync_twin(api.Session.consumer, JmsConsumer)
    shared_consumer = blocking.sync_twin(api.Session.shared_consumer, JmsConsumer)
    durable_consumer = blocking.sync_twin(api.Session.durable_consumer, JmsConsumer)
    shared_durable_consumer = blocking.sync_twin(api.Session.shared_durable_consumer, JmsConsumer)
    unsubscribe = blocking.sync(api.Session.unsubscribe)
    browse = blocking.sync_iterator(api.Session.browse)
    temporary_queue = blocking.sync(api.Session.temporary_queue)
    temporary_topic = blocking.sync(api.Session.temporary_topic)
    delete_temporary = blocking.sync(api.Session.delete_temporary)
    acknowledge = blocking.sync(api.Session.acknowledge)
    commit = blocking.sync(api.Session.commit)
    rollback = blocking.sync(api.Session.rollback)
    recover = blocking.sync(api.Session.recover)
    close = blocking.sync(api.Session.close)

    def queue(self, name: str) -> destinations.Destination:
        return destinations.queue(name)

    def topic(self, name: str) -> destinations.Destination:
        return destinations.topic(name)

    def producer(self, destination: destinations.Destination | None = None, **options: Any) -> JmsProducer:
        return JmsProducer(self._async.producer(destination, **options), self._loop)


@blocking.documented_as(api.Connection)
class JmsConnection(blocking.ClosingTwin[api.Connection]):
    close = blocking.sync(api.Connection.close)

    def session(self, mode: api.AcknowledgeMode = api.AcknowledgeMode.AUTO) -> JmsSession:
        async def begin() -> api.Session:
            return self._async.session(mode)

        return JmsSession(self._loop.wait(begin()), self._loop)


@blocking.documented_as(front.AsyncMuster)
class Muster(blocking.ClosingTwin[front.AsyncMuster]):
    publish = blocking.sync(front.AsyncMuster.publish)
    request = blocking.sync(front.AsyncMuster.request)
    reply = blocking.sync(front.AsyncMuster.reply)
    queues = blocking.sync(front.AsyncMuster.queues)
    subscribe = blocking.sync_twin(front.AsyncMuster.subscribe, TopicSubscription)
    on = blocking.sync_decorator(front.AsyncMuster.on, front.AsyncMuster.serve)
    on_change = blocking.sync_decorator(front.AsyncMuster.on_change, front.AsyncMuster.serve_changes)
    receiver = blocking.sync_decorator(front.AsyncMuster.receiver, front.AsyncMuster.serve_events)
    adapter = blocking.sync_decorator(front.AsyncMuster.adapter, front.AsyncMuster.serve_adapter)

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
        return self._async.identity

    @property
    def home(self) -> Path | None:
        """The home of the domain, if it is on this machine."""
        return self._async.home

    def queue(self, name: str) -> Queue:
        return Queue(self._async.queue(name), self._loop)

    def jms(self, client_id: str | None = None) -> JmsConnection:
        async def connect() -> api.Connection:
            return await self._async.jms(client_id).__aenter__()

        return JmsConnection(self._loop.wait(connect()), self._loop)

    def middleware(self, around: front.M) -> front.M:
        return self._async.middleware(around)  # it runs in the event loop, and may not block

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
        self._loop.call(self._async.stop)

    def close(self) -> None:
        if not self._loop.is_stopped:
            self._loop.wait(self._async.close())
            self._loop.stop()


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

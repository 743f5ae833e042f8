"""`muster.open`: the objects of `muster.client.front` with blocking calls.

Behind them one thread runs an event loop with the connection, so that they work in programs without a loop,
in notebooks, which have a running one, and from several threads.  Each method is that of the other class.
"""

from __future__ import annotations

import functools
import inspect
import re
import signal
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from muster import blocking
from muster.client import contexts, fleet, front, history, messages, monitoring, notifications, queues
from muster.core import errors
from muster.inform import protocol as inform_protocol
from muster.manage import rows as manage_rows
from muster.message import messages as jms
from muster.notify import client as notify_client
from muster.notify import models as notify_models

A = TypeVar("A")
P = ParamSpec("P")
T = TypeVar("T")
COMPLETIONS_MAX = 1_000

_ASYNC = re.compile(r"\basync (?=with|for|def)|\bawait ")


def _wrap(method: Callable[..., Any], wrapper: Callable[..., Any]) -> Any:
    functools.update_wrapper(wrapper, method)
    wrapper.__doc__ = _ASYNC.sub("", (method.__doc__ or "").replace("_async", ""))
    del wrapper.__wrapped__  # type: ignore[attr-defined]  # else it counts as a coroutine function
    wrapper.__signature__ = _signature(method)  # type: ignore[attr-defined]
    return wrapper


def _signature(method: Callable[..., Any]) -> Any:
    signature = inspect.signature(method)
    returned = str(signature.return_annotation).replace("AsyncIterator", "Iterator")
    return signature.replace(return_annotation=returned.replace("Async", ""))


def sync(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], T]:
    """The coroutine method as a blocking one."""

    def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = self._loop.wait(method(self._async, *args, **kwargs))
        return result

    wrapped: Callable[Concatenate[Any, P], T] = _wrap(method, call)
    return wrapped


def sync_iterator(
    method: Callable[Concatenate[A, P], AsyncIterator[T]],
) -> Callable[Concatenate[Any, P], Iterator[T]]:
    """The asynchronous generator as a plain one."""

    def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        items: Iterator[T] = self._loop.iterate(method(self._async, *args, **kwargs))
        return items

    wrapped: Callable[Concatenate[Any, P], Iterator[T]] = _wrap(method, call)
    return wrapped


def _documented(cls: type[Any]) -> Callable[[type[T]], type[T]]:
    """Take over the documentation of the asynchronous class."""

    def decorate(twin: type[T]) -> type[T]:
        twin.__doc__ = _ASYNC.sub("", cls.__doc__ or "")
        return twin

    return decorate


class _Twin(Generic[A]):
    """``_async``: the asynchronous object; ``_loop``: where it runs."""

    def __init__(self, asynchronous: A, loop: blocking.EventLoopThread) -> None:
        self._async = asynchronous
        self._loop = loop

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if not name.startswith("_")]

    def __repr__(self) -> str:
        return repr(self._async)


@_documented(contexts.AsyncContexts)
class Contexts(_Twin[contexts.AsyncContexts]):
    get = sync(contexts.AsyncContexts.get)
    put = sync(contexts.AsyncContexts.put)
    delete = sync(contexts.AsyncContexts.delete)
    find = sync(contexts.AsyncContexts.find)
    keys = sync_iterator(contexts.AsyncContexts.keys)
    history = sync(contexts.AsyncContexts.history)
    watch = sync_iterator(contexts.AsyncContexts.watch)
    where = sync(contexts.AsyncContexts.where)

    def __getitem__(self, key: str) -> inform_protocol.Context:
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


@_documented(queues.AsyncQueue)
class Queue(_Twin[queues.AsyncQueue]):
    send = sync(queues.AsyncQueue.send)
    receive = sync(queues.AsyncQueue.receive)
    messages = sync_iterator(queues.AsyncQueue.messages)
    browse = sync_iterator(queues.AsyncQueue.browse)
    depth = sync(queues.AsyncQueue.depth)
    scheduled = sync(queues.AsyncQueue.scheduled)
    cancel = sync(queues.AsyncQueue.cancel)

    @property
    def name(self) -> str:
        return self._async.name

    def __len__(self) -> int:
        return self.depth()

    def __bool__(self) -> bool:  # a queue is there, whether messages wait or not
        return True

    def __iter__(self) -> Iterator[jms.JmsMessage]:
        return self.messages()


@_documented(notifications.AsyncReceiver)
class Receiver(_Twin[notifications.AsyncReceiver]):
    update = sync(notifications.AsyncReceiver.update)
    policy = sync(notifications.AsyncReceiver.policy)
    next = sync(notifications.AsyncReceiver.next)
    leave = sync(notifications.AsyncReceiver.leave)

    @property
    def name(self) -> str:
        return self._async.name

    @property
    def id(self) -> str:
        return self._async.id

    def __iter__(self) -> Iterator[notify_client.ReceivedEvent]:
        return self._loop.iterate(aiter(self._async))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.wait(self._async.__aexit__())


@_documented(notifications.AsyncNotify)
class Notify(_Twin[notifications.AsyncNotify]):
    send = sync(notifications.AsyncNotify.send)
    define = sync(notifications.AsyncNotify.define)
    define_event = sync(notifications.AsyncNotify.define_event)
    models = sync(notifications.AsyncNotify.models)
    receivers = sync(notifications.AsyncNotify.receivers)
    _join = sync(notifications.AsyncNotify.join)

    def join(
        self,
        name: str,
        model: str,
        state: notify_models.State | None = None,
        *,
        policy: str,
        durable: bool = False,
    ) -> Receiver:
        """Register a receiver. ``durable``: durable events are stored while it is disconnected."""
        return Receiver(self._join(name, model, state, policy=policy, durable=durable), self._loop)


@_documented(fleet.AsyncFleet)
class Fleet(_Twin[fleet.AsyncFleet]):
    resources = sync(fleet.AsyncFleet.resources)
    describe = sync(fleet.AsyncFleet.describe)
    apply = sync(fleet.AsyncFleet.apply)
    plan = sync(fleet.AsyncFleet.plan)
    delete = sync(fleet.AsyncFleet.delete)
    execute = sync(fleet.AsyncFleet.execute)
    execute_many = sync(fleet.AsyncFleet.execute_many)
    operations = sync(fleet.AsyncFleet.operations)
    logs = sync(fleet.AsyncFleet.logs)
    wait = sync(fleet.AsyncFleet.wait)
    watch = sync_iterator(fleet.AsyncFleet.watch)
    names = sync(fleet.AsyncFleet.names)
    agents = sync(fleet.AsyncFleet.agents)
    managers = sync(fleet.AsyncFleet.managers)

    def __getitem__(self, name: str) -> manage_rows.ResourceDescription:
        """All details of a resource, as `describe`."""
        try:
            return self.describe(name)
        except errors.NotFound as error:
            raise KeyError(name) from error

    def _ipython_key_completions_(self) -> list[str]:
        return self.names()[:COMPLETIONS_MAX]


@_documented(monitoring.AsyncAlerts)
class Alerts(_Twin[monitoring.AsyncAlerts]):
    list = sync(monitoring.AsyncAlerts.list)
    watch = sync_iterator(monitoring.AsyncAlerts.watch)
    acknowledge = sync(monitoring.AsyncAlerts.acknowledge)
    resolve = sync(monitoring.AsyncAlerts.resolve)
    silence = sync(monitoring.AsyncAlerts.silence)


@_documented(monitoring.AsyncReports)
class Reports(_Twin[monitoring.AsyncReports]):
    system = sync(monitoring.AsyncReports.system)
    group = sync(monitoring.AsyncReports.group)
    zone = sync(monitoring.AsyncReports.zone)
    top = sync(monitoring.AsyncReports.top)
    nodes = sync(monitoring.AsyncReports.nodes)


@_documented(history.AsyncHistory)
class History(_Twin[history.AsyncHistory]):
    sql = sync(history.AsyncHistory.sql)
    search = sync(history.AsyncHistory.search)

    def at(self, root: str | Path) -> History:
        """The history in this folder or at this URL (``s3://…``)."""
        return History(self._async.at(root), self._loop)


@_documented(messages.AsyncSubscription)
class Subscription(_Twin[messages.AsyncSubscription]):
    next = sync(messages.AsyncSubscription.next)
    close = sync(messages.AsyncSubscription.close)

    @property
    def topic(self) -> str:
        return self._async.topic

    def __iter__(self) -> Iterator[messages.Message]:
        return self._loop.iterate(aiter(self._async))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@_documented(front.AsyncMuster)
class Muster(_Twin[front.AsyncMuster]):
    publish = sync(front.AsyncMuster.publish)
    request = sync(front.AsyncMuster.request)
    reply = sync(front.AsyncMuster.reply)
    queues = sync(front.AsyncMuster.queues)
    _subscribe = sync(front.AsyncMuster.subscribe)

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

    def subscribe(self, topic: str, *, where: str | None = None, group: str | None = None) -> Subscription:
        """Receive the messages of a topic or a pattern of topics.

        ``where``: only messages whose headers and JSON fields match this predicate. ``group``: share the
        messages among the subscribers of this group.

        >>> with m.subscribe("orders/>") as orders:
        ...     m.publish("orders/eu", "17 boxes")
        ...     order = orders.next(timeout_s=10)
        >>> order
        Message('orders/eu', '17 boxes')
        """
        return Subscription(self._subscribe(topic, where=where, group=group), self._loop)

    def queue(self, name: str) -> Queue:
        """The queue of this name; it exists as soon as a message is sent to it."""
        return Queue(self._async.queue(name), self._loop)

    def on(
        self, topic: str, *, where: str | None = None, group: str | None = None
    ) -> Callable[[front.H], front.H]:
        """Call the decorated function for each message of a topic, or of a queue (``queue:NAME``).

        Its parameter receives the message; annotated with `str`, `bytes`, or any other type, it receives the
        text, the data, or the JSON decoded as that type.  What it returns is the reply to a request.  If it
        raises for a message of a queue, the message is delivered again.

        >>> @m.on("echo")
        ... def echo(text: str) -> str:
        ...     return text.upper()
        >>> m.request("echo", "hello").text
        'HELLO'
        """

        def decorate(handler: front.H) -> front.H:
            self._loop.wait(self._async.serve(handler, topic, where=where, group=group))
            return handler

        return decorate

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
        """Wait until SIGINT, SIGTERM or `stop`, while the decorated functions are called."""
        previous: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                previous[number] = signal.signal(number, lambda *_: self.stop())
        try:
            self._loop.wait(self._async.wait_stopped())
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

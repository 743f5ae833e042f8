"""Operations of the services, declared once: each service has a table of them in its ``operations.py``.

An operation is a method of the service's client: its parameters are the request, and its annotation is the
type of the rows.  The declaration adds what a method cannot say: the line of help, the columns that people
see of the rows, and of a change its name and target in the activity log.  A change is for operators; what
only reads is for viewers.

The command (`muster.cli.leaf`), the route with its OpenAPI entry (`muster.web.rest.route`), the cached read
of the dashboard and the column titles of its tables derive from the declaration.  A command or a route that
does more is written out, and takes from it what fits.
"""

from __future__ import annotations

import functools
import importlib
import typing
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ServiceOperation:
    """``client``: a module of functions that take the bus first, or ``module:Class``, a client that is made
    with the bus.  It is imported when it is first used: the help page of a command needs no client.

    ``data``: the name of what is read or changed, for caches.  ``columns``: of a list; a name that ends with
    ``?`` is shown if there is room.  ``records``: whether the service itself records the change.
    """

    client: str
    data: str
    method: str
    help: str
    columns: tuple[str, ...] = ()
    action: str = ""
    target: str = ""
    records: bool = True

    @property
    def function(self) -> Callable[..., Any]:
        owner = self._client
        function: Callable[..., Any] = getattr(owner, self.method)
        return function

    @property
    def returns(self) -> Any:
        """The type of the result."""
        return typing.get_type_hints(self.function)["return"]

    def call(self, bus: Any, request: dict[str, Any], **options: Any) -> Awaitable[Any]:
        """``options``: of the client."""
        if isinstance(self._client, type):
            bound: Callable[..., Awaitable[Any]] = getattr(self._client(bus, **options), self.method)
        else:
            bound = functools.partial(self.function, bus, **options)
        return bound(**request)

    @property
    def _client(self) -> Any:
        module, _, name = self.client.partition(":")
        imported = importlib.import_module(module)
        return getattr(imported, name) if name else imported

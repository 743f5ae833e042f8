"""Listeners for changes of the connection state."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from muster.bus import api
from muster.core.telemetry import log

events = log.EventLog("bus")

Listener = Callable[[api.ConnectionState], None]


class StateListeners:
    def __init__(self) -> None:
        self._listeners: list[Listener] = []

    def add(self, listener: Listener) -> Callable[[], None]:
        """The returned function ends it."""
        self._listeners.append(listener)

        def end() -> None:
            with contextlib.suppress(ValueError):
                self._listeners.remove(listener)

        return end

    def notify(self, state: api.ConnectionState) -> None:
        for listener in list(self._listeners):
            try:
                listener(state)
            except Exception as error:  # noqa: BLE001  (the other listeners must be called too)
                events.event("listener-failed", level=logging.ERROR, error=error)

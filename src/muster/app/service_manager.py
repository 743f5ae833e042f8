"""Reports to systemd: the process serves, works, stops.

The protocol is that of ``sd_notify``: datagrams to the socket in ``NOTIFY_SOCKET``. Without it, as in a
terminal, nothing is sent. With ``WATCHDOG_USEC`` systemd kills and restarts a process that does not report
within that time; the report comes from the event loop, so a process that is frozen or blocked sends none.

A process that starts, or hardly gets processor time, is late without being frozen, and a restart would make
that worse. So the process asks systemd for more time until it serves, and as long as its event loop was late
recently.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Mapping, MutableMapping

from muster.core.telemetry import log
from muster.supervision import tasks

events = log.EventLog("app")

REPORTS = 5  # within the time of the watchdog
PATIENCE = 6  # times the time of the watchdog, for a process that starts or was late
LATE = 0.5  # of the time of the watchdog between two reports: the process hardly gets processor time
HAND_OVER_S = 180  # until another program reports: as long as a start may take
CALM_S = 10.0  # without being late, until the time of the watchdog is the usual one
VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
READY, STOPPING, ALIVE = "READY=1", "STOPPING=1", "WATCHDOG=1"


def is_present(environment: Mapping[str, str]) -> bool:
    """Whether a service manager starts this process again if it ends."""
    return bool(environment.get("NOTIFY_SOCKET"))


class ServiceManager:
    def __init__(self, environment: MutableMapping[str, str]) -> None:
        """The variables are removed: child processes must not report for this one."""
        self._environment = environment
        self._taken = {name: environment[name] for name in VARIABLES if name in environment}
        self._address = environment.pop("NOTIFY_SOCKET", "")
        interval = environment.pop("WATCHDOG_USEC", "")
        environment.pop("WATCHDOG_PID", "")
        self._watchdog_us = int(interval) if interval.isdigit() else 0
        self._interval_s = self._watchdog_us / 1e6 / REPORTS
        self._late_at_s = -CALM_S  # by the event loop's clock
        self._serves = False

    @contextlib.asynccontextmanager
    async def reporting(self) -> AsyncIterator[None]:
        """Report that the process works while this is open: until it ends, because stopping may take longer
        than systemd waits for a report."""
        supervisor = tasks.TaskSupervisor("systemd")
        supervisor.loop("reports", self._report_alive)
        try:
            yield
        finally:
            await supervisor.close()

    def notify(self, state: str) -> None:
        if state == READY:
            self._serves, self._late_at_s = True, -CALM_S  # a start is hard work, and over
        if not self._address:
            return
        # A leading @ stands for the zero byte of an abstract address.
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
                sender.sendto(state.encode(), address)
        except OSError as error:  # the watchdog decides what a lost report means
            events.warning("systemd-unreachable", error=error)

    def hand_over(self) -> None:
        """This process continues as another program, which reports from its start on."""
        if self._watchdog_us:
            self.notify(f"WATCHDOG_USEC={HAND_OVER_S * 1_000_000}")
            self.notify(ALIVE)
        self._environment.update(self._taken)

    async def _report_alive(self) -> None:
        loop, granted = asyncio.get_running_loop(), 0
        while self._address and self._interval_s:
            reported_at_s = loop.time()
            calm = self._serves and reported_at_s - self._late_at_s >= CALM_S
            patience = 1 if calm else PATIENCE
            if patience != granted:
                granted = patience
                self.notify(f"WATCHDOG_USEC={self._watchdog_us * patience}")
            self.notify(ALIVE)
            await asyncio.sleep(self._interval_s)
            if loop.time() - reported_at_s > LATE * REPORTS * self._interval_s:
                self._late_at_s = loop.time()

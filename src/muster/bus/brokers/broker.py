"""One broker: a ``nats-server`` process that Muster starts, supervises, reconfigures and stops.

*Ports.* Before the server starts, each of its ports is bound without listening, and stays bound for the
lifetime of the `Broker`. Such a socket does not conflict with the server (both sides set SO_REUSEADDR), but
the system does not assign the port to other processes. So a port of 0 is resolved without a race, peers can
be configured before the process runs, a port in use is detected at once, and the port cannot be lost between
a crash and the restart.

*Life cycle.* The server runs in its own session, so that Ctrl-C in a terminal does not reach it. If this
process dies, for any reason, a guardian process ends the server; with ``outlive_s`` only if no successor of
this process adopts the server in time (`server_process`).

*Liveness* is a reply of the health page, not a running process: a broker that does not reply is killed and
restarted like one that crashed; one that only lacks processor time has longer for it
(`muster.supervision.responsiveness`). Its clients and peers notice the closed connections at once.

*Ready* means that the health page of the broker reports it; a member of a cluster is ready when it is up, and
the network waits for the quorum.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self

from muster.bus.brokers import (
    binary,
    config,
    control,
    diagnosis,
    files,
    monitor,
    ports,
    server_process,
    topology,
)
from muster.core import backoff, errors
from muster.supervision import children, os_process, responsiveness

log = logging.getLogger(__name__)

START_TIMEOUT_S = 15.0
STOP_TIMEOUT_S = 10.0
RELOAD_TIMEOUT_S = 5.0
LINK_TIMEOUT_S = 5.0
PROBE_POLICY = children.ProbePolicy(
    period_s=1.0, timeout_s=2 * (monitor.SILENT_S + monitor.CONFIRM_S), failures_max=1
)
POLL_S_MIN, POLL_S_MAX = 0.004, 0.05

BrokerState = children.ChildState


class Broker:
    """``async with Broker(config) as broker: … broker.url``, or call `start` and `stop`."""

    def __init__(
        self,
        settings: config.BrokerConfig,
        *,
        program: Path | None = None,
        supervise: backoff.BackoffPolicy | None = None,
        outlive_s: float = 0.0,
        listener: Callable[[Broker], None] | None = None,
        trust: Callable[[], config.OperatorTrust] | None = None,
    ) -> None:
        """``outlive_s``: how long the server waits for the successor of this process. ``trust`` returns the
        current accounts; it runs in a thread before each start of the process, so that a broker knows what
        was revoked while it was down before it accepts clients."""
        config.check(settings)
        self.config = settings  # with every port known from `reserve` on
        self.state = BrokerState.STOPPED
        self.failure: errors.MusterError | None = None  # of the last crash
        self.binary: binary.ServerBinary | None = None
        self._program = program
        self._child = children.ChildSupervisor(
            f"broker {settings.name}",
            self._launch,
            policy=supervise or backoff.BackoffPolicy(),
            probe=self._works,
            probe_policy=dataclasses.replace(PROBE_POLICY, grace_s=0.0),
            describe_end=self._describe_end,
            on_change=self._child_changed,
        )
        self.adopted = False  # whether a former process started the server
        self._outlive_s = outlive_s
        self._orphan: server_process.BrokerProcess | None = None  # a server that runs already
        self._listener = listener
        self._trust = trust
        self._held: ports.Held = {}
        self._start_timeout_s = START_TIMEOUT_S
        self._ends_since_s: float | None = None  # it was asked to end because its disk had been full
        self._has_stored = False  # whether this process was healthy before
        self._leash: int | None = None  # the near end of the guardian's pipe
        self._log_offset = 0
        self._changed = asyncio.Event()
        self._lock = asyncio.Lock()

    # Properties

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def url(self) -> str:
        """For clients on this machine."""
        return self._url("tls" if self.config.tls else "nats", self.config.port)

    @property
    def address(self) -> str:
        """Host and port for clients on this machine."""
        return config.authority(config.reachable(self.config.host), self.config.port)

    @property
    def monitor_url(self) -> str:
        return f"http://127.0.0.1:{self.config.monitor_port}"

    @property
    def leaf_url(self) -> str | None:
        """For other brokers' leaf links."""
        leaf = self.config.leaf
        return None if leaf is None else self._url("tls" if self.config.tls else "nats-leaf", leaf.port)

    @property
    def websocket_url(self) -> str | None:
        listener = self.config.websocket
        return None if listener is None else self._url("wss" if self.config.tls else "ws", listener.port)

    @property
    def mqtt_url(self) -> str | None:
        listener = self.config.mqtt
        return None if listener is None else self._url("mqtts" if self.config.tls else "mqtt", listener.port)

    @property
    def pid(self) -> int | None:
        return self._child.pid

    @property
    def restarts(self) -> int:
        return self._child.restarts

    def _url(self, scheme: str, port: int) -> str:
        return f"{scheme}://{config.authority(config.reachable(self.config.host), port)}"

    async def monitoring_page(self, page: str) -> dict[str, Any]:
        """A page of its monitor, such as ``varz``."""
        return await monitor.get_monitor(self.monitor_url, page)

    async def health(self) -> monitor.BrokerHealth:
        answer = await monitor.health(self.monitor_url)
        self._has_stored = self._has_stored or answer.ok
        return answer

    async def problem(self) -> errors.MusterError | None:
        """The current problem with its remedy, if there is one, such as a full disk. A broker that cannot
        store messages continues to forward them, and only its health page reports that."""
        if self.failure is not None and self.state in (BrokerState.RESTARTING, BrokerState.FAILED):
            return self.failure
        full = await asyncio.to_thread(files.full_disk, self.config)
        if full is not None:
            return full
        answer = await self.health()
        if answer.silent:
            return diagnosis.silent(self.name)
        return None if answer.ok else diagnosis.unhealthy(self.name, answer.reason)

    # Life

    async def reserve(self) -> None:
        """Reserve its ports before it starts, unless it runs already. `start` does it too; a network needs
        the ports earlier."""
        if self._orphan is not None:
            return
        holding = asyncio.create_task(asyncio.to_thread(ports.reserve, self.config, self._held))
        try:
            self.config = await asyncio.shield(holding)
        except asyncio.CancelledError:
            await asyncio.wait([holding])  # its thread would bind more after all were released
            raise

    async def find_orphan(self) -> None:
        """Find the server of a former process, for the next `start`; else use the same ports again."""
        last = await asyncio.to_thread(server_process.load, self.config)
        if last is None:
            return
        preferred = server_process.with_ports(self.config, last)
        if await asyncio.to_thread(server_process.runs, last, self.config):
            self._orphan, self.config = last, preferred
        else:
            with contextlib.suppress(diagnosis.BrokerFailed):
                self.config = await asyncio.to_thread(ports.reserve, preferred, self._held)

    async def start(self, *, timeout_s: float = START_TIMEOUT_S) -> None:
        """When this returns, the broker accepts clients."""
        async with self._lock:
            if self.state is not BrokerState.STOPPED:
                raise errors.Conflict(f"broker {self.name} is {self.state.value} already")
            self.failure = None
            await self._begin(timeout_s)

    async def stop(self, *, drain_s: float = 0.0, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stop it. With ``drain_s`` it first transfers leadership and disconnects its clients, for at most
        that long; a process that does not end within ``timeout_s`` is killed."""
        async with self._lock:
            await self._end((signal.SIGUSR2, drain_s), (signal.SIGTERM, timeout_s))
            ports.release(self._held)
            self._set(BrokerState.STOPPED)

    async def restart(
        self,
        settings: config.BrokerConfig | None = None,
        *,
        drain_s: float = 0.0,
        timeout_s: float = START_TIMEOUT_S,
        between: Callable[[], None] | None = None,
    ) -> None:
        """Stop it and start it again on the same ports, with other settings if given. ``between`` runs in a
        thread while the process does not."""
        async with self._lock:
            await self._end((signal.SIGUSR2, drain_s), (signal.SIGTERM, STOP_TIMEOUT_S))
            if between is not None:
                await asyncio.to_thread(between)
            self.config = settings or self.config
            await self._begin(timeout_s)

    async def kill(self) -> None:
        """Stop it as a power cut would. It is not started again."""
        await self.stop(timeout_s=0.0)

    async def wait_for(self, *states: BrokerState) -> BrokerState:
        """Wait until it is in one of these."""
        while self.state not in states:
            await self._changed.wait()
        return self.state

    async def wait_healthy(self, *, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until its health page reports success: for a member of a cluster, until the storage has a
        leader."""

        async def healthy() -> bool:
            if self.state in (BrokerState.FAILED, BrokerState.STOPPED):
                raise self.failure or errors.NotConnected(f"broker {self.name} does not run")
            return (await self.health()).ok

        try:
            await poll_until(healthy, timeout_s=timeout_s)
        except TimeoutError:
            raise diagnosis.BrokerFailed(
                f"broker {self.name} is not healthy after {timeout_s:g} s: {(await self.health()).reason}",
                fault=diagnosis.BrokerFault.NOT_READY,
                log_tail=await self.log_tail(),
                hint="see whether the other brokers of its cluster run and can be reached",
            ) from None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    # Change while it runs

    async def apply(self, settings: config.BrokerConfig) -> None:
        """Write its configuration and reload it without a restart. Changes that the server does not support
        at run time are rejected, and the old configuration stays in use."""
        async with self._lock:
            process = self._child.process
            if process is None:
                raise errors.NotConnected(f"broker {self.name} does not run")
            await asyncio.to_thread(files.write_config, settings)
            try:
                await self._reload(process)
            except BaseException:
                await asyncio.to_thread(files.write_config, self.config)
                children.send_signal(process, signal.SIGHUP)  # it may have accepted the new one
                raise
            self.config = settings

    async def reload(self) -> None:
        """Have it read its files again: certificates that were replaced in place, above all."""
        await self.apply(self.config)

    async def link(self, remote: config.LeafRemote, *, timeout_s: float | None = LINK_TIMEOUT_S) -> None:
        """Create a leaf link to another broker, and wait until it is up; ``timeout_s`` None does not wait. A
        link that does not come up is removed."""
        self._require_live_links()
        for known in self.config.remotes:
            if known.id == remote.id:
                raise errors.AlreadyExists(f"broker {self.name} has a link {remote.id!r} already")
        if timeout_s is not None and not await ports.resolve(remote.urls):
            raise diagnosis.unknown_host(self.name, remote.id, remote.urls)
        offset = await asyncio.to_thread(files.size, self.config.log_path)
        await self.apply(dataclasses.replace(self.config, remotes=(*self.config.remotes, remote)))
        if timeout_s is None:
            return

        async def up() -> bool:
            return any(link.up for link in await self.links() if link.id == remote.id)

        try:
            await poll_until(up, timeout_s=timeout_s)
        except TimeoutError:
            output = await asyncio.to_thread(files.read_from, self.config.log_path, offset)
            await self.unlink(remote.id)
            raise diagnosis.dead_link(self.name, remote.id, remote.urls, output) from None

    async def unlink(self, id: str) -> None:
        """Remove a leaf link. When this returns, no message crosses it any more."""
        self._require_live_links()
        remaining = tuple(remote for remote in self.config.remotes if remote.id != id)
        if len(remaining) == len(self.config.remotes):
            known = ", ".join(remote.id for remote in self.config.remotes) or "none"
            raise errors.NotFound(f"broker {self.name} has no leaf link {id!r}", hint=f"its links: {known}")
        await self.apply(dataclasses.replace(self.config, remotes=remaining))

    async def links(self) -> list[control.LinkRow]:
        """Its leaf links as they are now."""
        addresses = {remote.id: await ports.resolve(remote.urls) for remote in self.config.remotes}
        return topology.leaf_links(
            self.name, self.config.remotes, addresses, await self.monitoring_page("leafz")
        )

    def _require_live_links(self) -> None:
        if self.binary is not None:
            self.binary.require("live leaf links")

    async def _reload(self, process: children.ProcessHandle) -> None:
        before = (await self.monitoring_page("varz"))["config_load_time"]
        offset = await asyncio.to_thread(files.size, self.config.log_path)

        async def loaded() -> bool:
            with contextlib.suppress(errors.Unavailable):  # its monitor may be slow once
                if (await self.monitoring_page("varz"))["config_load_time"] != before:
                    return True
            output = await asyncio.to_thread(files.read_from, self.config.log_path, offset)
            refusal = diagnosis.refused_reload(self.name, output)
            if refusal is not None:
                raise refusal
            return False

        children.send_signal(process, signal.SIGHUP)
        try:
            await poll_until(loaded, timeout_s=RELOAD_TIMEOUT_S)
        except TimeoutError:
            raise errors.TimedOut(f"broker {self.name} did not reload in {RELOAD_TIMEOUT_S:g} s") from None

    # The process

    async def _begin(self, timeout_s: float) -> None:
        self._set(BrokerState.STARTING)
        self._start_timeout_s = timeout_s
        try:
            self.binary = await binary.find(self._program)
            orphan, self._orphan = self._orphan, None
            if orphan is not None and await self._adopt(orphan):
                return
            await self.reserve()
            await asyncio.to_thread(files.prepare, self.config)
            await self._child.start()
        except BaseException:
            ports.release(self._held)
            self._set(BrokerState.STOPPED)
            raise
        finally:
            self._start_timeout_s = START_TIMEOUT_S

    async def _adopt(self, orphan: server_process.BrokerProcess) -> bool:
        """Supervise the server of a former process, or end it."""
        assert self.binary is not None
        process = os_process.ForeignProcess(orphan.pid)
        self._log_offset = await asyncio.to_thread(files.size, self.config.log_path)
        self._leash = await server_process.adopt(orphan, self.config, str(self.binary.path), self.monitor_url)
        if self._leash is None:
            await children.end_process(process, (signal.SIGTERM, STOP_TIMEOUT_S))
            return False
        # Nothing is awaited from here on: `stop` ends the server only if it is supervised.
        self.adopted = True
        self._child.start_soon(process)
        return True

    async def _launch(self) -> asyncio.subprocess.Process:
        assert self.binary is not None
        await self.reserve()  # unless it is held already: the ports of an adopted server are not
        if self._trust is not None:
            self.config = dataclasses.replace(self.config, trust=await asyncio.to_thread(self._trust))
            await asyncio.to_thread(files.write_config, self.config)
        self._log_offset = await asyncio.to_thread(files.size, self.config.log_path)
        process, self._leash = await server_process.launch(
            self.config, self.binary.path, outlive_s=self._outlive_s
        )
        self._ends_since_s, self._has_stored, self.adopted = None, False, False
        try:
            await server_process.begin(process, self.config, self.binary.path)
            await self._wait_until_up(process)
        except BaseException:
            await children.end_process(process)
            self._release_guardian()
            raise
        return process

    async def _wait_until_up(self, process: asyncio.subprocess.Process) -> None:
        async def up() -> bool:
            if process.returncode is not None:
                raise diagnosis.explain(self.name, await self._output(), process.returncode)
            return (await monitor.health(self.monitor_url, "js-enabled-only=true")).ok

        timeout_s = self._start_timeout_s
        try:
            await poll_until(up, timeout_s=timeout_s)
        except TimeoutError:
            raise diagnosis.BrokerFailed(
                f"broker {self.name} is not ready after {timeout_s:g} s",
                fault=diagnosis.BrokerFault.NOT_READY,
                log_tail=await self.log_tail(),
            ) from None

    async def _works(self) -> bool:
        """Whether the server replies. One that stopped storing because its disk was full does not recover by
        itself: it is asked to end when there is space again."""
        await server_process.keep_guarded(self._leash, self.config, self._child.pid, self._outlive_s)
        health = await monitor.health(self.monitor_url, timeout_s=monitor.SILENT_S)
        if health.silent:
            health = await monitor.health(self.monitor_url, timeout_s=monitor.CONFIRM_S)
        if health.silent:
            return False
        self._has_stored = self._has_stored or health.ok
        problem = None if health.ok else diagnosis.unhealthy(self.name, health.reason)
        full = problem is not None and problem.fault is diagnosis.BrokerFault.DISK_FULL
        # A member of a cluster reports no more than that.
        ended = self._has_stored and diagnosis.NOT_ENABLED in health.reason
        if not (full or ended) or not await asyncio.to_thread(files.has_room, self.config):
            return True
        now_s = asyncio.get_running_loop().time()
        if self._ends_since_s is None and self._child.process is not None:
            log.warning("broker %s: its disk has space again; restarting it", self.name)
            self._ends_since_s = now_s
            children.send_signal(self._child.process, signal.SIGTERM)
        return self._ends_since_s is None or now_s - self._ends_since_s < STOP_TIMEOUT_S

    async def _describe_end(self, exit_code: int | None) -> errors.MusterError:
        self._release_guardian()
        if self._child.killed_for is responsiveness.SilenceReason.BUSY:
            return diagnosis.silent(self.name, PROBE_POLICY.busy_s)
        if self._child.killed_for is not None:
            return diagnosis.silent(self.name, monitor.SILENT_S + monitor.CONFIRM_S)
        return diagnosis.explain(self.name, await self._output(), exit_code or 0)

    def _child_changed(self) -> None:
        match self._child.state:
            case BrokerState.RESTARTING:
                self.failure = self._child.failure
            case BrokerState.FAILED:
                assert self._child.failure is not None
                self.failure = diagnosis.restart_limit_reached(
                    self.name, self._child.crashes, self._child.failure
                )
            case BrokerState.STOPPED:
                return  # its ports are released first
        if self._child.state is not self.state:
            self._set(self._child.state)

    async def _end(self, *steps: tuple[signal.Signals, float]) -> None:
        """Have the process end: each signal with the seconds it is given to work, and SIGKILL if none did."""
        await self._child.stop(*steps)
        self._release_guardian()

    def _release_guardian(self) -> None:
        """The server has ended: so can its guardian."""
        if self._leash is not None:
            with contextlib.suppress(OSError):  # the guardian was killed
                os.write(self._leash, b"\n")
            os.close(self._leash)
            self._leash = None

    async def log_tail(self) -> list[str]:
        """The last lines it wrote since it was started."""
        return (await self._output()).splitlines()[-diagnosis.TAIL_LINES :]

    async def _output(self) -> str:
        return await asyncio.to_thread(files.output, self.config, self._log_offset)

    def _set(self, state: BrokerState) -> None:
        self.state = state
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        if self._listener is not None:
            self._listener(self)


async def poll_until(condition: Callable[[], Awaitable[bool]], *, timeout_s: float) -> None:
    """Call until it returns True, first often, then twenty times a second. TimeoutError if it does not."""
    pause_s = POLL_S_MIN
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(pause_s)
            pause_s = min(POLL_S_MAX, pause_s * 1.5)

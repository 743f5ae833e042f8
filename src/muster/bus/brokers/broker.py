"""One broker: a ``nats-server`` process that Muster starts, supervises, reconfigures and stops.

*Ports.* Before the server starts, each of its ports is bound without listening, and stays bound for the
lifetime of the `Broker`. Such a socket does not conflict with the server (both sides set SO_REUSEADDR), but
the system does not assign the port to other processes. So a port of 0 is resolved without a race, peers can
be configured before the process runs, a port in use is detected at once, and the port cannot be lost between
a crash and the restart.

*Life cycle.* The server runs in its own session, so that Ctrl-C in a terminal does not reach it. The shell
that becomes the server first starts a guardian process that reads from a pipe which this process keeps open.
If this process dies, for any reason, the pipe ends and the guardian ends the server.

*Liveness* is a reply of the health page, not a running process: a broker that does not reply is killed and
restarted like one that crashed. Its clients and peers notice the closed connections at once.

*Ready* means that the health page of the broker reports it; a member of a cluster is ready when it is up, and
the network waits for the quorum.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import logging
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from muster.bus.brokers import binary, config, diagnosis, files, monitor, ports, topology
from muster.core import backoff, errors

log = logging.getLogger(__name__)

START_TIMEOUT_S = 15.0
STOP_TIMEOUT_S = 10.0
RELOAD_TIMEOUT_S = 5.0
LINK_TIMEOUT_S = 5.0
LOOK_UP_S = 3.0  # for resolving a host name
PROBE_INTERVAL_S = 1.0
SILENT_S = 3.0  # a broker whose health page does not reply for this long is frozen
CONFIRM_S = 1.0  # for a second request, in case that this process was the one that stood still
POLL_S_MIN, POLL_S_MAX = 0.004, 0.05

# $$ is the process id of the shell and, after exec, of the server. A line of input means: a regular end.
_GUARDED = """
exec 3<&0 </dev/null
{
    if ! read -r _ <&3; then
        kill -TERM $$
        for _ in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do kill -0 $$ && sleep 0.2; done
        kill -KILL $$
    fi
} >/dev/null 2>&1 &
exec "$@" 3<&-
"""


class BrokerState(enum.Enum):
    STOPPED = "stopped"
    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"  # it crashed; the next start is scheduled
    FAILED = "failed"  # it crashed too often; no further restart


class Broker:
    """``async with Broker(config) as broker: … broker.url``, or call `start` and `stop`."""

    def __init__(
        self,
        settings: config.BrokerConfig,
        *,
        program: Path | None = None,
        supervise: backoff.BackoffPolicy | None = None,
        outlive_us: bool = False,
        listener: Callable[[Broker], None] | None = None,
    ) -> None:
        config.check(settings)
        self.config = settings  # with every port known from `reserve` on
        self.state = BrokerState.STOPPED
        self.restarts = 0
        self.failure: errors.MusterError | None = None  # of the last crash
        self.binary: binary.ServerBinary | None = None
        self._program = program
        self._supervision = supervise or backoff.BackoffPolicy()
        self._guarded = not outlive_us
        self._listener = listener
        self._held: ports.Held = {}
        self._process: asyncio.subprocess.Process | None = None
        self._leash: int | None = None  # the near end of the guardian's pipe
        self._log_offset = 0
        self._supervisor: asyncio.Task[None] | None = None
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
        return None if self._process is None else self._process.pid

    def _url(self, scheme: str, port: int) -> str:
        return f"{scheme}://{config.authority(config.reachable(self.config.host), port)}"

    async def monitoring_page(self, page: str) -> dict[str, Any]:
        """A page of its monitor, such as ``varz``."""
        return await monitor.get_monitor(self.monitor_url, page)

    async def health(self) -> monitor.BrokerHealth:
        return await monitor.health(self.monitor_url)

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
        """Reserve its ports before it starts. `start` does it too; a network needs the ports earlier."""
        holding = asyncio.create_task(asyncio.to_thread(ports.reserve, self.config, self._held))
        try:
            self.config = await asyncio.shield(holding)
        except asyncio.CancelledError:
            await asyncio.wait([holding])  # its thread would bind more after all were released
            raise

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
            await self._finish((signal.SIGUSR2, drain_s), (signal.SIGTERM, timeout_s))
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
            await self._finish((signal.SIGUSR2, drain_s), (signal.SIGTERM, STOP_TIMEOUT_S))
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
            if self._process is None:
                raise errors.NotConnected(f"broker {self.name} does not run")
            process = self._process
            await asyncio.to_thread(files.write_config, settings)
            try:
                await self._reload(process)
            except BaseException:
                await asyncio.to_thread(files.write_config, self.config)
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGHUP)  # it may have accepted the new one
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
        if timeout_s is not None and not await _addresses(remote.urls):
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

    async def links(self) -> list[topology.LinkStatus]:
        """Its leaf links as they are now."""
        addresses = {remote.id: await _addresses(remote.urls) for remote in self.config.remotes}
        return topology.leaf_links(
            self.name, self.config.remotes, addresses, await self.monitoring_page("leafz")
        )

    def _require_live_links(self) -> None:
        if self.binary is not None:
            self.binary.require("live leaf links")

    async def _reload(self, process: asyncio.subprocess.Process) -> None:
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

        process.send_signal(signal.SIGHUP)
        try:
            await poll_until(loaded, timeout_s=RELOAD_TIMEOUT_S)
        except TimeoutError:
            raise errors.TimedOut(f"broker {self.name} did not reload in {RELOAD_TIMEOUT_S:g} s") from None

    # The process

    async def _begin(self, timeout_s: float) -> None:
        self._set(BrokerState.STARTING)
        try:
            self.binary = await binary.find(self._program)
            await self.reserve()
            await asyncio.to_thread(files.prepare, self.config)
            await self._launch(timeout_s)
        except BaseException:
            await self._end()
            ports.release(self._held)
            self._set(BrokerState.STOPPED)
            raise
        self._supervisor = asyncio.create_task(self._supervise(), name=f"broker {self.name}")

    async def _finish(self, *steps: tuple[signal.Signals, float]) -> None:
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
            self._supervisor = None
        await self._end(*steps)

    async def _launch(self, timeout_s: float) -> None:
        assert self.binary is not None
        command = [str(self.binary.path), "-c", str(self.config.config_path)]
        if self._guarded:
            command = ["/bin/sh", "-c", _GUARDED, "muster-broker", *command]
        self._log_offset = await asyncio.to_thread(files.size, self.config.log_path)
        try:
            # Not in a thread: a cancellation would leave it open.
            output = self.config.output_path.open("wb")
        except OSError as error:
            raise diagnosis.unwritable(self.name, error) from error
        try:
            far_end, self._leash = os.pipe()
        except OSError as error:
            output.close()
            raise errors.Unavailable(f"broker {self.name}: no process could be started: {error}") from error
        try:
            process = self._process = await asyncio.create_subprocess_exec(
                *command, stdin=far_end, stdout=output, stderr=output, start_new_session=True
            )
        except OSError as error:
            raise errors.Unavailable(f"broker {self.name}: no process could be started: {error}") from error
        finally:
            os.close(far_end)
            output.close()

        async def up() -> bool:
            if process.returncode is not None:
                raise diagnosis.explain(self.name, await self._said(), process.returncode)
            return (await monitor.health(self.monitor_url, "js-enabled-only=true")).ok

        try:
            await poll_until(up, timeout_s=timeout_s)
        except TimeoutError:
            raise diagnosis.BrokerFailed(
                f"broker {self.name} is not ready after {timeout_s:g} s",
                fault=diagnosis.BrokerFault.NOT_READY,
                log_tail=await self.log_tail(),
            ) from None
        self._set(BrokerState.RUNNING)

    async def _supervise(self) -> None:
        crashes_at_s: list[float] = []
        while True:
            assert self._process is not None
            self.failure = await self._failure_of(self._process)
            await self._end()
            crashes_at_s.append(time.monotonic())
            if not await self._restart(crashes_at_s):
                return

    async def _failure_of(self, process: asyncio.subprocess.Process) -> errors.MusterError:
        """Probe the server until it ends; return the reason. One that does not recover by itself is ended
        here: a frozen one, and one that stopped storing because its disk was full, when there is space."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PROBE_INTERVAL_S):
                    exit_code = await process.wait()
                    return diagnosis.explain(self.name, await self._said(), exit_code)
            health = await monitor.health(self.monitor_url, timeout_s=SILENT_S)
            if health.silent:
                health = await monitor.health(self.monitor_url, timeout_s=CONFIRM_S)
            if health.silent and process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
                return diagnosis.silent(self.name, SILENT_S + CONFIRM_S)
            problem = None if health.ok else diagnosis.unhealthy(self.name, health.reason)
            if (
                problem is not None
                and problem.fault is diagnosis.BrokerFault.DISK_FULL
                and await asyncio.to_thread(files.has_room, self.config)
            ):
                log.warning("broker %s: its disk has space again; restarting it", self.name)
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(STOP_TIMEOUT_S):
                        await process.wait()
                with contextlib.suppress(ProcessLookupError):
                    process.kill()

    async def _restart(self, crashes_at_s: list[float]) -> bool:
        """Restart it after a crash, with as many attempts as allowed; False if there is no further
        restart."""
        while True:
            now_s = time.monotonic()
            crashes_at_s[:] = backoff.recent(self._supervision, crashes_at_s, now_s)
            pause_s = backoff.next_delay_s(self._supervision, len(crashes_at_s))
            if pause_s is None:
                assert self.failure is not None
                self.failure = diagnosis.restart_limit_reached(self.name, len(crashes_at_s), self.failure)
                log.error("%s", self.failure.message)
                self._set(BrokerState.FAILED)
                return False
            log.warning("%s; starting it again in %.1f s", self.failure, pause_s)
            self._set(BrokerState.RESTARTING)
            await asyncio.sleep(pause_s)
            try:
                await self._launch(START_TIMEOUT_S)
            except (errors.MusterError, OSError) as error:
                # Whatever is wrong must not end the supervision.
                if isinstance(error, errors.MusterError):
                    self.failure = error
                else:
                    self.failure = errors.Unavailable(f"broker {self.name}: {error}")
                await self._end()
                crashes_at_s.append(time.monotonic())
            else:
                self.restarts += 1
                return True

    async def _end(self, *steps: tuple[signal.Signals, float]) -> None:
        """Have the process end: each signal with the seconds it is given to work, and SIGKILL if none did."""
        process = self._process
        for step, patience_s in (*steps, (signal.SIGKILL, None)):
            if process is not None and process.returncode is None and patience_s != 0:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(step)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(patience_s):
                        await process.wait()
        self._process = None
        if self._leash is not None:
            with contextlib.suppress(OSError):  # the guardian was killed
                os.write(self._leash, b"\n")
            os.close(self._leash)
            self._leash = None

    async def log_tail(self) -> list[str]:
        """The last lines it wrote since it was started."""
        return (await self._said()).splitlines()[-diagnosis.TAIL_LINES :]

    async def _said(self) -> str:
        return await asyncio.to_thread(
            lambda: (
                files.read_from(self.config.output_path, 0)
                + files.read_from(self.config.log_path, self._log_offset)
            )
        )

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


async def _addresses(urls: Iterable[str]) -> set[topology.Address]:
    """The IP addresses of these URLs. A name that cannot be resolved in time has none."""
    addresses: set[topology.Address] = set()
    for url in urls:
        parts = urlsplit(url)
        with contextlib.suppress(OSError, UnicodeError):  # the latter: it cannot be a name
            async with asyncio.timeout(LOOK_UP_S):
                results = await asyncio.get_running_loop().getaddrinfo(
                    parts.hostname, parts.port or 7422, type=socket.SOCK_STREAM
                )
            addresses |= {(str(address[0]), int(address[1])) for _, _, _, _, address in results}
    return addresses

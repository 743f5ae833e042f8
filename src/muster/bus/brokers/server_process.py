"""The process of a broker: its guardian, and its adoption by the successor of the domain's process.

A restart of all brokers costs an election (4 to 9 s), in which nothing is stored. So a domain that is
restarted after a crash takes over the brokers of its predecessor. A file in the folder of each broker
describes its process: by this the successor finds it, and uses the same ports. A server starts only when the
file describes it: a second server that uses the same storage would destroy it.

The guardian of a broker (`GUARDED`) reads from a named pipe that the domain holds open for writing. The pipe
ends with the domain; a successor opens it again. If none does in time, the guardian ends the broker. The
domain notices that a guardian was killed, and starts another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import logging
import math
import os
import select
from pathlib import Path

import msgspec

from muster.bus.brokers import config, diagnosis, monitor
from muster.core import errors, files
from muster.supervision import children, os_process

log = logging.getLogger(__name__)

# Opens the pipe for reading as 4, also if no domain has it open any more: a plain open would wait for one.
_OPEN = '[ -p "$pipe" ] || exit; exec 3<>"$pipe" 4<"$pipe" 3>&-'
# Reads from 4 and then from $pipe, and ends the server ($pid) if there is no domain for $outlive_s seconds. A
# line of input means: a regular end. When the pipe is opened again, it may be that of another server; this
# one has ended then.
_GUARDIAN = """
{
    read -r _ <&4 && exit
    exec 4<&-
    while :; do
        left_s=$outlive_s
        until [ "$left_s" -gt 0 ] && timeout 1 sh -c ': <"$0"' "$pipe"; do
            kill -0 $pid || exit
            left_s=$((left_s - 1))
            [ "$left_s" -gt 0 ] && continue
            kill -TERM $pid
            for _ in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do kill -0 $pid && sleep 0.2; done
            kill -KILL $pid
            exit
        done
        kill -0 $pid || exit
        read -r _ <"$pipe" && exit
    done
} </dev/null >/dev/null 2>&1 &
"""
# Arguments: the pipe, the seconds without a domain, the command. $$ is the process id of the shell and, after
# exec, of the server. A line from the standard input means: start.
GUARDED = f"""
umask 077
pipe=$1 outlive_s=$2 pid=$$
{_OPEN}
read -r _ || exit
shift 2
{_GUARDIAN}
exec "$@" </dev/null 4<&-
"""
# Arguments: the pipe, the seconds without a domain, the process id of the server.
GUARDIAN = f"pipe=$1 outlive_s=$2 pid=$3\n{_OPEN}\n{_GUARDIAN}"


class BrokerProcess(msgspec.Struct, frozen=True, kw_only=True):
    """The last process of a broker."""

    pid: int
    started: str  # see `os_process.start_time`
    program: str
    config: str  # see `fingerprint`
    ports: dict[str, int]  # by listener


def runs(process: BrokerProcess, settings: config.BrokerConfig) -> bool:
    """Whether it runs as the server of these settings: the file may be in a copy of the folder, and the
    process that of the original. Blocks."""
    with contextlib.suppress(OSError):
        if not process.started or os_process.start_time(process.pid) != process.started:
            return False
        command = Path(f"/proc/{process.pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        # Empty while the shell becomes the server.
        return not command[-1] or os.path.samefile(command[-1], settings.config_path)
    return False


def fingerprint(settings: config.BrokerConfig) -> str:
    """Of the settings that cannot change while a broker runs: all but accounts, routes and leaf links."""
    trust = settings.trust
    if trust is not None:
        system = {trust.system_account: trust.accounts[trust.system_account]}
        trust = dataclasses.replace(trust, accounts=system)
    cluster = settings.cluster and dataclasses.replace(settings.cluster, routes=(), founders=())
    text = config.render(dataclasses.replace(settings, trust=trust, remotes=(), cluster=cluster))
    return hashlib.sha256(text.encode()).hexdigest()


def load(settings: config.BrokerConfig) -> BrokerProcess | None:
    """Blocks."""
    with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return msgspec.json.decode(settings.process_path.read_bytes(), type=BrokerProcess)
    return None


def _store(settings: config.BrokerConfig, pid: int, program: str) -> None:
    """Blocks."""
    process = BrokerProcess(
        pid=pid,
        started=os_process.start_time(pid),
        program=program,
        config=fingerprint(settings),
        ports={listener: port for listener, _, port in config.ports(settings)},
    )
    files.write(settings.process_path, msgspec.json.encode(process), durable=False)


def with_ports(settings: config.BrokerConfig, process: BrokerProcess) -> config.BrokerConfig:
    """The settings with the ports of this process where they leave them open."""
    for listener, _, port in tuple(config.ports(settings)):
        if not port and process.ports.get(listener):
            settings = config.with_port(settings, listener, process.ports[listener])
    return settings


def _make_pipe(settings: config.BrokerConfig) -> int:
    """A new pipe, from which no former guardian reads; the end for writing."""
    settings.pipe_path.unlink(missing_ok=True)
    os.mkfifo(settings.pipe_path, 0o600)
    reader = os.open(settings.pipe_path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a writer needs one
    try:
        return os.open(settings.pipe_path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    finally:
        os.close(reader)


def is_guarded(pipe: int) -> bool:
    """Whether a guardian reads from the pipe."""
    poller = select.poll()
    poller.register(pipe, 0)
    return not poller.poll(0)  # only errors are reported: there is no reader


async def keep_guarded(
    pipe: int | None, settings: config.BrokerConfig, pid: int | None, outlive_s: float
) -> None:
    """Start another guardian of a server that runs, if the first one was killed."""
    if pipe is None or pid is None or is_guarded(pipe):
        return
    log.warning("broker %s: its guardian has ended; starting another", settings.name)
    shell = await asyncio.create_subprocess_exec(
        *("/bin/sh", "-c", GUARDIAN, "muster-guardian", str(settings.pipe_path)),
        *(str(math.ceil(outlive_s)), str(pid)),
        stdin=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    await children.exit_code(shell)


async def launch(
    settings: config.BrokerConfig, program: Path, *, outlive_s: float
) -> tuple[asyncio.subprocess.Process, int]:
    """A process that becomes the server, with a guardian, when `begin` is called; and the guardian's pipe.
    If this process ends before, so does that one."""
    try:
        # Not in a thread: a cancellation would leave it open.
        output = files.open_private(settings.output_path, "wb")
    except OSError as error:
        raise diagnosis.unwritable(settings.name, error) from error
    pipe = -1
    try:
        pipe = _make_pipe(settings)
        process = await asyncio.create_subprocess_exec(
            *("/bin/sh", "-c", GUARDED, "muster-broker", str(settings.pipe_path), str(math.ceil(outlive_s))),
            *(str(program), "-c", str(settings.config_path)),
            stdin=asyncio.subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    except BaseException as error:
        if pipe >= 0:
            os.close(pipe)
        if isinstance(error, OSError):
            raise errors.Unavailable(
                f"broker {settings.name}: no process could be started: {error}"
            ) from error
        raise
    finally:
        output.close()
    return process, pipe


async def begin(process: asyncio.subprocess.Process, settings: config.BrokerConfig, program: Path) -> None:
    """Describe the process for a successor, then let it start the server."""
    assert process.stdin is not None
    try:
        await asyncio.to_thread(_store, settings, process.pid, str(program))
    except OSError as error:
        raise diagnosis.unwritable(settings.name, error) from error
    process.stdin.write(b"\n")
    process.stdin.close()


async def adopt(
    process: BrokerProcess, settings: config.BrokerConfig, program: str, monitor_url: str
) -> int | None:
    """The pipe of its guardian; None if the process cannot be adopted: it has other settings, no guardian, or
    does not reply."""
    if (process.program, process.config) != (program, fingerprint(settings)):
        return None
    if not (await monitor.health(monitor_url, "js-enabled-only=true")).ok:
        return None
    for _ in range(20):  # for moments a guardian does not read
        with contextlib.suppress(OSError):
            # Not in a thread: a cancellation would leave it open.
            return os.open(settings.pipe_path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        await asyncio.sleep(0.05)
    return None

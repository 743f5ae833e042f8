"""From the output of a failed broker to an error that names the problem and the remedy. Pure."""

from __future__ import annotations

import enum
import errno
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from muster.core import errors

TAIL_LINES = 12
NOT_ENABLED = "JetStream not enabled"  # the server's words: it does not store, or not yet


class BrokerFault(enum.Enum):
    PORT_TAKEN = "port-taken"
    BAD_ADDRESS = "bad-address"
    UNWRITABLE = "unwritable"
    DISK_FULL = "disk-full"
    BAD_CONFIG = "bad-config"
    NOT_READY = "not-ready"
    CRASHED = "crashed"
    SILENT = "silent"
    CRASH_LOOP = "crash-loop"
    RELOAD_REFUSED = "reload-refused"
    DEAD_LINK = "dead-link"


class BrokerFailed(errors.Unavailable):
    """A broker that did not start, or crashed. ``log_tail`` is the end of its output."""

    code = "broker-failed"

    def __init__(
        self, message: str, *, fault: BrokerFault, log_tail: Sequence[str] = (), hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.fault = fault
        self.log_tail = tuple(log_tail)


class _Rule(NamedTuple):
    pattern: re.Pattern[str]
    fault: BrokerFault
    message: str  # with the pattern's groups
    hint: str


_FREE_SPACE = "free some space, or configure a directory on another disk"
_MAKE_WRITABLE = "make it writable for this user, or configure another directory"
_BIND = r"listen tcp[46]? (\S+): bind: "
_RULES = (
    _Rule(
        re.compile(_BIND + "address already in use"),
        BrokerFault.PORT_TAKEN,
        "{0} is in use by another program",
        "stop that program, or set another port: `--set bus.port=0` for a free one, or in muster.toml",
    ),
    _Rule(
        re.compile(_BIND + "cannot assign requested address"),
        BrokerFault.BAD_ADDRESS,
        "{0} is not an address of this machine",
        "configure an address that this machine has, or 127.0.0.1",
    ),
    _Rule(
        re.compile(_BIND + "permission denied"),
        BrokerFault.BAD_ADDRESS,
        "this user may not listen on {0}",
        "configure a port above 1023",
    ),
    _Rule(
        re.compile(r"(/\S+): no space left on device"),
        BrokerFault.DISK_FULL,
        "the disk is full: {0} could not be written",
        _FREE_SPACE,
    ),
    _Rule(
        re.compile(r"^nats-server: (?:.*?:\d+:\d+: )?(.+)"),
        BrokerFault.BAD_CONFIG,
        "the server refuses its configuration: {0}",
        "correct this value in the settings of the broker",
    ),
    _Rule(
        re.compile(
            r"(?:open|mkdir|write) (/.*?): "
            r"(permission denied|read-only file system|not a directory|no such file or directory)"
        ),
        BrokerFault.UNWRITABLE,
        "{0} cannot be used: {1}",
        _MAKE_WRITABLE,
    ),
    _Rule(re.compile(r"\[FTL\] (.+)"), BrokerFault.CRASHED, "{0}", "the broker's log has more"),
    _Rule(
        re.compile(r"(panic: .+|fatal error: .+)"),
        BrokerFault.CRASHED,
        "the server crashed: {0}",
        "the broker's log has more",
    ),
)
_RELOAD = re.compile(r"\[ERR\] Failed to reload server configuration: (.+)")


def explain(name: str, output: str, exit_code: int | None) -> BrokerFailed:
    """The error for a broker that ended by itself, having written ``output`` since it was started."""
    lines = [line for line in output.splitlines() if line.strip()]
    killed = exit_code is not None and exit_code < 0
    how = f"was killed by signal {-(exit_code or 0)}" if killed else f"ended ({exit_code})"
    known = _match(lines, (BrokerFault.CRASHED,) if killed else tuple(BrokerFault))
    message, fault, hint = known or (how, BrokerFault.CRASHED, "its log may have more details")
    return BrokerFailed(
        f"broker {name}{':' if known else ''} {message}", fault=fault, log_tail=lines[-TAIL_LINES:], hint=hint
    )


def _match(lines: Sequence[str], among: Collection[BrokerFault]) -> tuple[str, BrokerFault, str] | None:
    for rule in _RULES:
        if rule.fault in among:
            for line in reversed(lines):
                if match := rule.pattern.search(line):
                    return rule.message.format(*match.groups()), rule.fault, rule.hint
    return None


def restart_limit_reached(name: str, crashes: int, last: errors.MusterError) -> BrokerFailed:
    tail = last.log_tail if isinstance(last, BrokerFailed) else ()
    times = "once" if crashes == 1 else f"{crashes} times"
    return BrokerFailed(
        f"broker {name} crashed {times} and is not restarted any more; the last error: {last.message}",
        fault=BrokerFault.CRASH_LOOP,
        log_tail=tail,
        hint=last.hint or "the broker's log has more",
    )


def refused_reload(name: str, output: str) -> BrokerFailed | None:
    """The server's refusal of a new configuration, if ``output`` has one."""
    match = _RELOAD.search(output)
    if match is None:
        return None
    return BrokerFailed(
        f"broker {name} rejected its new configuration: {match[1]}",
        fault=BrokerFault.RELOAD_REFUSED,
        log_tail=output.splitlines()[-TAIL_LINES:],
        hint="listeners, routes, gateways and names are fixed while the server runs: restart it",
    )


_LEAF_REASONS = (
    (r"Loop detected", "it would close a ring of links", "remove another link of the ring first"),
    (
        r"[Aa]uthorization [Vv]iolation|[Aa]uthentication",
        "its credentials were refused",
        "see the credentials",
    ),
    (r"TLS|tls:|x509", "the two ends do not agree on TLS", "see the certificates, and tls:// in the address"),
    (r"no such host|lookup", "the far end's name is not known", "see the address"),
    (
        r"connection refused|i/o timeout|no route",
        "the remote broker does not respond",
        "see that it runs and listens",
    ),
)


def dead_link(name: str, id: str, urls: Sequence[str], output: str) -> BrokerFailed:
    """The error for a leaf link that did not come up, from the log output of its broker."""
    complaints = [line for line in output.splitlines() if "[ERR]" in line or "[WRN]" in line]
    reason, hint = next(
        (
            (reason, hint)
            for pattern, reason, hint in _LEAF_REASONS
            if any(re.search(pattern, line) for line in complaints)
        ),
        ("the remote broker does not respond", "see that it runs and listens for leaf links"),
    )
    where = re.sub(r"//[^@/\s]*@", "//", " ".join(urls))  # never show a password
    return BrokerFailed(
        f"broker {name}: the link {id} to {where} did not come up: {reason}",
        fault=BrokerFault.DEAD_LINK,
        log_tail=complaints[-TAIL_LINES:],
        hint=hint,
    )


def unknown_host(name: str, id: str, urls: Sequence[str]) -> BrokerFailed:
    """For a link that is not even tried."""
    hosts = ", ".join(str(urlsplit(url).hostname) for url in urls)
    return BrokerFailed(
        f"broker {name}: the link {id} cannot come up: no address is known for the host {hosts}",
        fault=BrokerFault.DEAD_LINK,
        hint="check its spelling, and the DNS or the hosts file of this machine",
    )


def unbindable(name: str, address: str, error: OSError) -> BrokerFailed:
    """The error for a port that could not be reserved, with the same text as for an error of the server."""
    reason = {errno.EADDRINUSE: "address already in use", errno.EACCES: "permission denied"}.get(
        error.errno or 0, "cannot assign requested address"
    )
    return explain(name, f"listen tcp {address}: bind: {reason}", None)


def unhealthy(name: str, reason: str) -> BrokerFailed:
    """The error for a running broker that reports a problem."""
    known = _match(reason.splitlines() or [""], (BrokerFault.DISK_FULL, BrokerFault.UNWRITABLE))
    if known is None:
        return BrokerFailed(f"broker {name} is not healthy: {reason}", fault=BrokerFault.NOT_READY)
    message, fault, hint = known
    return BrokerFailed(f"broker {name}: {message}", fault=fault, hint=hint)


def silent(name: str, killed_after_s: float | None = None) -> BrokerFailed:
    """The error for a running broker that does not reply, or did not and was killed."""
    killed = killed_after_s is not None
    return BrokerFailed(
        f"broker {name} did not reply for {killed_after_s:g} s and was killed"
        if killed
        else f"broker {name} runs, but does not reply",
        fault=BrokerFault.SILENT,
        hint="see whether the machine is overloaded or short of memory, or its disk hangs",
    )


def disk_full(name: str, folder: Path, free_bytes: int) -> BrokerFailed:
    return BrokerFailed(
        f"broker {name}: the disk is full: {free_bytes} bytes are free for {folder}",
        fault=BrokerFault.DISK_FULL,
        hint=_FREE_SPACE,
    )


def unwritable(name: str, error: OSError) -> BrokerFailed:
    """The error for a file that could not be written before the server started."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return BrokerFailed(
            f"broker {name}: the disk is full: {error.filename}",
            fault=BrokerFault.DISK_FULL,
            hint=_FREE_SPACE,
        )
    return BrokerFailed(
        f"broker {name}: {error.filename} cannot be written: {error.strerror}",
        fault=BrokerFault.UNWRITABLE,
        hint=_MAKE_WRITABLE,
    )

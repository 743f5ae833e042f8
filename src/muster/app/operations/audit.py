"""The audit of operations on the command line.

A command that uses the bus sends its entry to the domain's process, which stores it under the identity that
the broker authenticated, whatever the message contains:

    muster.audit.from.<identity>.act        a `Decision`; the reply confirms that it is stored
    muster.audit.log.decision.<what>        the audit, in the stream ``decisions``

Operations without the bus (credentials, passwords, backups) write notes to the domain's folder, one small
file each; the domain's process imports them within a second, or at its next start.  The registry and the
dashboard write to the same stream themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import msgspec

from muster.app.components import component
from muster.app.components import context as context_
from muster.bus import api
from muster.bus.rpc import client, request_audit, server
from muster.core import errors, files, leaky_buckets, messages, subjects
from muster.core.telemetry import log

events = log.EventLog("audit")

PART = "audit"
KIND = "act"
FOLDER = "audit"  # in the domain's folder: notes that are not imported yet
LOOK_S = 1.0
TEXT_MAX = 1000  # characters that a sender says in its own words
DETAILS = ("interface", "user")  # what else it may state
LOGIN = "login"
FAILED_LOGINS = leaky_buckets.BucketBudget(1000, 30.0)  # notes per process
ENTRY_BUDGET = leaky_buckets.BucketBudget(1000, 10.0)  # entries per identity
PUBLISH_TIMEOUT_S = 15.0  # the stream may have to be created first, on a quorum of brokers


def audit_entry(
    who: str,
    what: str,
    target: str,
    why: str = "",
    outcome: messages.DecisionOutcome = messages.DecisionOutcome.DONE,
) -> messages.Decision:
    """An entry for a command of the user who is logged in here."""
    return request_audit.activity(
        who, what, target, why, outcome, details={"interface": "cli", "user": _user()}
    )


def _user() -> str:
    with contextlib.suppress(KeyError, OSError):  # an account without a name
        return getpass.getuser()
    return str(os.getuid())


async def publish_entry(
    bus: api.Bus, line: messages.Decision, *, timeout_s: float = PUBLISH_TIMEOUT_S
) -> None:
    """The entry is stored when this returns."""
    subject = subjects.from_identity(PART, bus.identity, KIND)
    absent = errors.Unavailable("no domain process stores an audit on this bus")
    answer = await client.exchange(
        bus, subject, messages.encode(line), timeout_s=timeout_s, waits=False, absent=absent
    )
    client.result_of(answer.data)


def append_entry(folder: Path, line: messages.Decision) -> None:
    """Write a note for the domain's process to import; it is on disk when this returns."""
    place = folder / FOLDER
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    files.create(place / f"{line.id}.json", messages.encode(line))


class FailedLogins:
    """Records each failed login at ``interface``. A note that cannot be written does not admit the client.

    The total number is limited, not the number per account or address: a client can use any account name, and
    may have many addresses.
    """

    def __init__(self, folder: Path, interface: str) -> None:
        self._folder = folder
        self._interface = interface
        self._refusals = request_audit.Refusals(self._summarise, FAILED_LOGINS)

    async def __call__(self, name: str, address: str) -> None:
        if self._refusals.admit(LOGIN):
            await self._note(name, f"wrong name or password, from {address}", address=address)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._refusals.close()

    async def _summarise(self, _: str, count: int) -> None:
        await self._note("", f"{count} failed logins were not recorded individually", count=f"{count}")

    async def _note(self, name: str, why: str, **details: str) -> None:
        refused = messages.DecisionOutcome.REFUSED
        entry = request_audit.activity(
            name, LOGIN, name, why, refused, details={"interface": self._interface} | details
        )
        try:
            await asyncio.to_thread(append_entry, self._folder, entry)
        except (OSError, errors.MusterError) as error:
            events.error("not-recorded", what=LOGIN, target=name, error=error)


class AuditComponent:
    """The component that stores audit entries."""

    name = "audit"
    depends_on: Sequence[str] = ()
    vital = False

    def __init__(self) -> None:
        self._context: context_.ComponentContext
        self._server: server.RpcServer | None = None
        self._writer: request_audit.ActivityWriter
        self._entry_budget = request_audit.Refusals(self._summarise, ENTRY_BUDGET)

    async def start(self, context: context_.ComponentContext) -> None:
        self._context = context
        budget = context.settings.retention.decisions
        limits = request_audit.stream_settings(
            max_bytes=budget.max_bytes, max_age_s=budget.max_age_s, replicas=context.settings.bus.replicas
        )
        self._writer = request_audit.ActivityWriter(context.bus, PART, limits)
        act = server.RpcOperation(
            KIND, self._record, audited=False, decode=lambda data: messages.decode(data, messages.Decision)
        )
        # In a queue group: one of several processes of the domain stores an entry.
        self._server = server.RpcServer(context.bus, PART, [act], group=PART)
        await self._server.start()
        context.tasks.loop("import", self._import_notes)

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.close()
            await self._entry_budget.close()

    def health(self) -> component.ComponentHealth:
        return component.ComponentHealth()

    async def _record(self, call: server.RpcCall, line: messages.Decision) -> None:
        """Overwrite most fields: a sender must not backdate entries or displace others by size or number."""
        if not self._entry_budget.admit(call.identity):
            raise errors.Overloaded(
                f"{call.identity} sent too many audit entries; this one is only counted",
                retry_after_s=ENTRY_BUDGET.forget_s,
            )
        stored = msgspec.structs.replace(
            line,
            who=call.identity,
            on_behalf_of="",
            epoch=0,
            at_ms=int(time.time() * 1000),
            why=line.why[:TEXT_MAX],
            details={name: line.details[name][:TEXT_MAX] for name in DETAILS if name in line.details},
            trace_id="",
        )
        await self._writer.store(stored)

    async def _summarise(self, identity: str, count: int) -> None:
        why = f"{count} entries of {identity} were not stored"
        refused = messages.DecisionOutcome.REFUSED
        try:
            await self._writer.store(
                request_audit.activity(
                    identity, request_audit.SUMMARY, identity, why, refused, details={"count": f"{count}"}
                )
            )
        except errors.MusterError as error:
            events.error("not-recorded", what=request_audit.SUMMARY, target=identity, error=error)

    async def _import_notes(self) -> None:
        while True:
            # Only the domain sets the limits of the stream, once the first entry or a restore created it.
            with contextlib.suppress(errors.MusterError):
                if not self._writer.is_open:
                    await self._context.bus.open_stream(messages.DECISIONS_STREAM)
                    await self._writer.open()
            for path in await asyncio.to_thread(_notes, self._context.folder.root / FOLDER):
                try:
                    data = await asyncio.to_thread(path.read_bytes)
                    await self._writer.store(messages.decode(data, messages.Decision))
                except errors.InvalidInput as error:  # no audit entry: drop it, else it is retried forever
                    self._context.log.warning("invalid-audit-note", file=path.name, error=error)
                except (errors.MusterError, OSError) as error:
                    self._context.log.warning("not-recorded", file=path.name, error=error)
                    break
                await asyncio.to_thread(path.unlink)
            await asyncio.sleep(LOOK_S)


def _notes(folder: Path) -> list[Path]:
    """The oldest first."""
    notes = [(path.stat().st_mtime_ns, path) for path in folder.glob("*.json")]
    return [path for _, path in sorted(notes)]

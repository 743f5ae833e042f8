"""Activities of WS-Context, stored as contexts: begin, complete, status, contents, nesting.

An activity is a context ``session/<id>``.  Its value is the contents of the activity, its attributes are the
status and the parent, and its lease is the timeout, so an activity that is never completed ends by itself.
An activity with active children cannot complete, a child does not outlive its parent, and a completed
activity does not change.

The rules are pure functions (`begin`, `complete`, `replace`).  `Activities` reads and writes the contexts
with compare-and-set.

A child and its parent are two contexts, and no write covers both.  Completion therefore has two steps: the
activity is marked as completing, and becomes completed only if a search finds no active child after that.
`Activities.begin` reads the parent again after the child is stored, and deletes the child if the parent is
completing or completed.  Each of the two can fail because of the other; both cannot succeed.  A process that
is killed between storing a child and reading the parent leaves the child until its timeout.
"""

from __future__ import annotations

import contextlib
import enum
import uuid
from collections.abc import Callable, Sequence

import msgspec

from muster.core import errors
from muster.inform import client, protocol

PREFIX = "session/"
KIND = "session"
TIMEOUT_S = 3_600.0
TIMEOUT_S_MAX = 30 * 86_400.0
REMEMBERED_S = 3_600.0  # how long a completed activity can be read
ATTEMPTS = 8


class ActivityStatus(enum.Enum):
    ACTIVE = "ACTIVE"
    COMPLETED = "COMPLETED"
    NO_ACTIVITY = "NO_ACTIVITY"


class InvalidActivityState(errors.Conflict):
    """The activity has completed, or its parent has."""

    code = "invalid-state"


class ChildActivityPending(errors.Conflict):
    code = "child-activity-pending"


class UnknownActivity(errors.NotFound):
    code = "no-activity"


class ActivityTimeoutOutOfRange(errors.InvalidInput):
    code = "timeout-out-of-range"


class Activity(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    contents: bytes = b""
    parent: str = ""
    status: ActivityStatus = ActivityStatus.ACTIVE
    expires_at_ns: int = 0
    version: int = 0
    owner: str = ""
    completing: bool = False  # no new children

    def attributes(self) -> protocol.Attributes:
        completing: protocol.Attributes = {"completing": True} if self.completing else {}
        return {"kind": KIND, "parent": self.parent, "status": self.status.value, **completing}


def check_timeout(timeout_s: float) -> float:
    if not 0 < timeout_s <= TIMEOUT_S_MAX:
        raise ActivityTimeoutOutOfRange(
            f"invalid timeout of {timeout_s:,.15g} s: it must be above 0 and at most {TIMEOUT_S_MAX:,.0f} s"
        )
    return timeout_s


def begin(id: str, parent: Activity | None, timeout_s: float, now_ns: int) -> Activity:
    """Return a new activity, a child of ``parent`` if that is given."""
    expires_at_ns = now_ns + int(check_timeout(timeout_s) * 1e9)
    if parent is None:
        return Activity(id=id, expires_at_ns=expires_at_ns)
    check_open(parent)
    return Activity(id=id, parent=parent.id, expires_at_ns=min(expires_at_ns, parent.expires_at_ns))


def check_open(parent: Activity) -> None:
    """Raise `InvalidActivityState` if no child may begin in ``parent``."""
    if parent.status is not ActivityStatus.ACTIVE or parent.completing:
        state = "completing" if parent.completing else parent.status.value
        raise InvalidActivityState(f"the activity {parent.id} is {state}: it accepts no children")


def begin_completing(session: Activity) -> Activity:
    if session.status is not ActivityStatus.ACTIVE:
        raise InvalidActivityState(f"the activity {session.id} is {session.status.value} already")
    return msgspec.structs.replace(session, completing=True)


def complete(session: Activity, active_children: Sequence[str], now_ns: int) -> Activity:
    if session.status is not ActivityStatus.ACTIVE:
        raise InvalidActivityState(f"the activity {session.id} is {session.status.value} already")
    if active_children:
        raise ChildActivityPending(
            f"{session.id} has {len(active_children)} active children: {', '.join(active_children[:5])}",
            hint="complete them first",
        )
    expires_at_ns = now_ns + int(REMEMBERED_S * 1e9)
    return msgspec.structs.replace(
        session, status=ActivityStatus.COMPLETED, expires_at_ns=expires_at_ns, completing=False
    )


def replace(session: Activity, contents: bytes) -> Activity:
    if session.status is not ActivityStatus.ACTIVE:
        raise InvalidActivityState(
            f"the activity {session.id} is {session.status.value}: its contents cannot change"
        )
    return msgspec.structs.replace(session, contents=contents)


class Activities:
    def __init__(self, contexts: client.InformClient, now_ns: Callable[[], int]) -> None:
        self._contexts = contexts
        self._now_ns = now_ns
        self._timeout_s = TIMEOUT_S

    @property
    def timeout_s(self) -> float:
        """The default timeout of activities that begin from now on."""
        return self._timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        self._timeout_s = check_timeout(timeout_s)

    async def begin(self, *, parent: str = "", timeout_s: float | None = None) -> Activity:
        outer = await self.get(parent) if parent else None
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        made = begin(str(uuid.uuid4()), outer, timeout_s, self._now_ns())
        stored = await self._put(made, expected_version=0)
        if parent:
            try:
                check_open(await self.get(parent))
            except BaseException:  # also on cancellation: no caller would complete the child
                await self._withdraw(stored)
                raise
        return stored

    async def _withdraw(self, session: Activity) -> None:
        with contextlib.suppress(errors.MusterError):  # it ends with its timeout
            await self._contexts.delete(PREFIX + session.id, expected_version=session.version)

    async def get(self, id: str) -> Activity:
        """Return the current state; `UnknownActivity` if it does not exist or has timed out."""
        try:
            context = await self._contexts.get(PREFIX + id, max_staleness_s=0.0)
        except errors.NotFound as error:
            raise UnknownActivity(f"no activity {id!r}: it does not exist or has timed out") from error
        attributes = context.attributes
        return Activity(
            id=id,
            contents=context.value,
            parent=str(attributes.get("parent", "")),
            status=ActivityStatus(attributes.get("status", ActivityStatus.ACTIVE.value)),
            # By the clock of this process, which may differ from that of the log.
            expires_at_ns=self._now_ns() + int(context.lease_left_s * 1e9),
            version=context.version,
            owner=context.writer,
            completing=bool(attributes.get("completing", False)),
        )

    async def status(self, id: str) -> ActivityStatus:
        try:
            return (await self.get(id)).status
        except UnknownActivity:
            return ActivityStatus.NO_ACTIVITY

    async def complete(self, id: str) -> Activity:
        session = await self.get(id)
        completing = begin_completing(session)
        try:
            session = await self._put(completing, expected_version=session.version)
        except errors.TimedOut:  # the mark may be stored
            await self._reopen(id)
            raise
        try:
            active = [child.key.removeprefix(PREFIX) for child in await self._active_children(id)]
            done = complete(session, active, self._now_ns())
            return await self._put(done, expected_version=session.version)
        except BaseException:
            await self._reopen(id)
            raise

    async def _reopen(self, id: str) -> None:
        """Clear the completing mark. If that fails, the activity can still be completed later."""
        with contextlib.suppress(errors.MusterError):
            for _ in range(ATTEMPTS):
                session = await self.get(id)
                if session.status is not ActivityStatus.ACTIVE or not session.completing:
                    return
                with contextlib.suppress(errors.Conflict):  # its contents were set meanwhile
                    await self._put(
                        msgspec.structs.replace(session, completing=False), expected_version=session.version
                    )
                    return

    async def set_contents(self, id: str, contents: bytes) -> Activity:
        session = await self.get(id)
        return await self._put(replace(session, contents), expected_version=session.version)

    async def _active_children(self, id: str) -> Sequence[protocol.Context]:
        quoted = id.replace("'", "''")
        children = await self._contexts.find(
            f"key LIKE '{PREFIX}%' AND kind = '{KIND}' AND parent = '{quoted}' "
            f"AND status = '{ActivityStatus.ACTIVE.value}'",
            limit=1_000,
        )
        if children.silent:
            raise errors.Unavailable(
                f"no reply from {children.silent_text}: there may be active children there"
            )
        return children.contexts

    async def _put(self, session: Activity, *, expected_version: int) -> Activity:
        left_s = (session.expires_at_ns - self._now_ns()) / 1e9
        if left_s <= 0:
            raise UnknownActivity(f"the activity {session.id!r} has timed out")
        written = await self._contexts.put(
            PREFIX + session.id,
            session.contents,
            attributes=session.attributes(),
            lease_s=max(0.001, left_s),
            expected_version=expected_version,
        )
        return msgspec.structs.replace(session, version=written.version)

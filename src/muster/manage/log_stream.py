"""Lines of the logs of resources, merged, up to the present end or as they are written.

The registry is asked for the next part of each log by a cursor (`protocol.LOGS`), often while lines arrive
and once a second otherwise. So nothing is queued for a reader: one that is slow reads later, and misses what
its machine has discarded meanwhile, which is noted. Each machine is asked on its own: one that does not reply
delays no other. The reader survives the loss of registry, manager and agent, and follows a resource that is
moved.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import TypeVar

from muster.core import errors
from muster.manage import protocol, rows

POLL_S, POLL_S_MAX, POLL_FACTOR = 0.2, 1.0, 1.5
FIND_S = 5.0  # between two looks where the resources are
LINE_MAX = 64 << 10
PART_MAX = 100  # resources of one request

T = TypeVar("T")
Queries = dict[str, protocol.LogQuery]
Read = Callable[[Queries], Awaitable[list[rows.LogRow]]]
#: The selected resources and their agents.
Find = Callable[[], Awaitable[dict[str, str]]]
Note = Callable[[str], None]


class LogPosition:
    """How far one log was read. Pure."""

    def __init__(self, name: str, query: protocol.LogQuery, *, follows: bool) -> None:
        self.name = name
        self.query = query
        self.is_done = False
        self.is_asked = False
        self.due_s = 0.0
        self._wait_s = POLL_S
        self._follows = follows
        self._rest = ""  # the line whose end is missing
        self._problem = ""

    def replied(self, now_s: float, row: rows.LogRow | None, note: Note) -> list[str]:
        """The lines in a reply; None: there was none."""
        self.is_asked = False
        self._wait_s = POLL_S if row and row.text else min(POLL_S_MAX, self._wait_s * POLL_FACTOR)
        self.due_s = now_s + (self._wait_s if row is None or row.is_last else 0)
        return self._take(row, note) if row is not None else []

    def _take(self, row: rows.LogRow, note: Note) -> list[str]:
        if row.reason:
            if row.reason != self._problem:
                note(f"{self.name}: {row.reason}")
            self._problem, self.is_done = row.reason, not self._follows
            return self._flush() if self.is_done else []
        self._problem = ""
        if row.dropped:
            note(f"{self.name}: {row.dropped} bytes were discarded before they were read")
        *lines, self._rest = (self._rest + row.text).split("\n")
        until = self.query.until or ("" if self._follows else row.end)
        self.query = protocol.LogQuery(cursor=row.cursor, until=until)
        if not row.cursor:
            if self._follows:
                note(f"{self.name}: its log cannot be followed")
            self.is_done = True
        elif row.is_last and not self._follows:
            self.is_done = True
        if self.is_done or (row.is_last and not row.text) or len(self._rest) > LINE_MAX:
            lines += self._flush()
        return lines

    def _flush(self) -> list[str]:
        rest, self._rest = self._rest, ""
        return [rest] if rest else []


class LogStream:
    def __init__(
        self,
        find: Find,
        read: Read,
        first: protocol.LogQuery,
        *,
        follows: bool,
        joins: bool = False,
        note: Note = lambda _: None,
    ) -> None:
        """``first``: of each log; of resources that are selected later, all is read. ``joins``: others may be
        selected, so it goes on without any. ``note`` gets each problem once.
        """
        self._joins = follows and joins
        self._find, self._read, self._first = find, read, first
        self._follows = follows
        self._note = note
        self._positions: dict[str, LogPosition] = {}
        self._agents: dict[str, str] = {}
        self._asked: dict[asyncio.Task[list[rows.LogRow]], list[str]] = {}
        self._finding: asyncio.Task[dict[str, str]] | None = None
        self._find_at_s = 0.0
        self._trouble = ""

    async def lines(self) -> AsyncGenerator[rows.LogLine]:
        loop = asyncio.get_running_loop()
        self._found(await self._find(), self._first)
        self._find_at_s = loop.time() + FIND_S
        try:
            while self._joins or not all(position.is_done for position in self._positions.values()):
                due_s = self._start_requests(loop.time())
                wait_s = max(0.0, due_s - loop.time())
                if tasks := [*self._asked, *filter(None, [self._finding])]:
                    await asyncio.wait(tasks, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
                else:
                    await asyncio.sleep(wait_s)
                for line in self._replies(loop.time()):
                    yield line
        finally:
            left = [*self._asked, *filter(None, [self._finding])]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    def _found(self, agents: dict[str, str], first: protocol.LogQuery) -> None:
        self._agents = agents
        for name in agents.keys() - self._positions.keys():
            self._positions[name] = LogPosition(name, first, follows=self._follows)
        for name in self._positions.keys() - agents.keys():
            self._note(f"{name}: it is not selected any more, or does not exist")
            del self._positions[name]

    def _start_requests(self, now_s: float) -> float:
        """Request what is due; returns when something is due next."""
        due: dict[str, list[str]] = {}
        idle = [
            position
            for _, position in sorted(self._positions.items())
            if not (position.is_done or position.is_asked)
        ]
        for position in idle:
            if position.due_s <= now_s:
                due.setdefault(self._agents[position.name], []).append(position.name)
        for names in due.values():
            for first in range(0, len(names), PART_MAX):
                part = names[first : first + PART_MAX]
                queries = {name: self._positions[name].query for name in part}
                for name in part:
                    self._positions[name].is_asked = True
                self._asked[asyncio.ensure_future(self._read(queries))] = part
        if self._follows and self._finding is None and self._find_at_s <= now_s:
            self._finding = asyncio.ensure_future(self._find())
        find_at_s = self._find_at_s if self._finding is None and self._follows else now_s + FIND_S
        return min([find_at_s, *(position.due_s for position in idle if not position.is_asked)])

    def _replies(self, now_s: float) -> Iterable[rows.LogLine]:
        if self._finding is not None and self._finding.done():
            task, self._finding, self._find_at_s = self._finding, None, now_s + FIND_S
            if (agents := self._result(task)) is not None:
                self._found(agents, protocol.LogQuery())
        for request in [request for request in self._asked if request.done()]:
            names = self._asked.pop(request)
            replies = {row.resource: row for row in self._result(request) or ()}
            for position in filter(None, map(self._positions.get, names)):
                for line in position.replied(now_s, replies.get(position.name), self._note):
                    yield rows.LogLine(resource=position.name, line=line)

    def _result(self, task: asyncio.Task[T]) -> T | None:
        """The result of a request; None: none yet. One who follows waits until the registry replies again."""
        try:
            result = task.result()
        except errors.MusterError as error:
            if not self._follows or not isinstance(error, errors.Unavailable | errors.NotFound):
                raise  # not found: deleted in this moment
            if str(error) != self._trouble:
                self._trouble = str(error)
                self._note(f"{error}; waiting")
            return None
        self._trouble = ""
        return result

"""Reactions: managed resources obey events that their policies accept.

For each resource that a rule selects, the domain registers a receiver of the same name.  An accepted event
goes, as the operation it requests, to the resource's manager, which has the desired state and the epoch; the
activity log names the sender of the event.  New resources become receivers as soon as they have a state, and
receivers of deleted resources leave.  All receivers of the domain's own identity belong to the reactions: at
the start, those of resources that were deleted while the domain was down leave, and all if `reactions.rules`
is empty since then.

A durable event is acknowledged when its request has a reply: done, failed, refused, or in doubt because even
the agent cannot determine the outcome. While no manager replies, or the agent's reply is lost, the request is
repeated under the same id and executed once. Later events of a resource wait, so commands run in order.
Events that are not durable are requested once.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Collection, Sequence

from muster.bus import api
from muster.core import errors, messages
from muster.core.telemetry import log
from muster.loop import reaction_rules
from muster.manage import client as manage
from muster.manage import protocol, rows
from muster.manage.agent import operation_log
from muster.notify import client as notify
from muster.notify import protocol as notify_protocol
from muster.notify import queries
from muster.supervision import tasks

events = log.EventLog("loop")

RETRY_S, RETRY_S_MAX = 0.5, 30.0
RESCAN_S = 10.0  # for changes that no state change announces, as of a label
PAGE = 1_000  # receivers of one query


class ResourceReceivers:
    """The receivers of a domain's resources, kept in step with the resources."""

    def __init__(
        self,
        bus: api.Bus,
        rules: Sequence[reaction_rules.ReactionSpec],
        report: Callable[[int, str], None] = lambda receivers, problem: None,
    ) -> None:
        self._bus = bus
        self._rules = rules
        self._report = report
        self._fleet = manage.ManageClient(bus)
        self._selected: list[list[rows.ResourceRow]] = [[] for _ in rules]  # by each rule
        self._rule_problem = ""  # of the first rule that cannot be evaluated
        self._joined: dict[str, reaction_rules.ResourceReceiver] = {}
        self._earlier_left = False  # whether the receivers of an earlier start have left, unless still due
        self._supervisor = tasks.TaskSupervisor("reactions")
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by resource

    async def run(self) -> None:
        self._joined.clear()
        self._earlier_left = False
        changed = asyncio.Event()
        async with (
            notify.NotifyClient(self._bus) as receivers,
            await self._bus.subscribe(protocol.STATES, handler=lambda _: changed.set()),
        ):
            try:
                while True:
                    problem = ""
                    try:
                        problem = await self._update(receivers)
                    except errors.Unavailable as error:  # no registry or notifier is active yet
                        problem = str(error)
                    self._report(len(self._joined), problem or self._rule_problem)
                    await asyncio.sleep(RETRY_S)  # many changes need one scan
                    if not problem:
                        with contextlib.suppress(TimeoutError):
                            await asyncio.wait_for(changed.wait(), RESCAN_S)
                    changed.clear()
            finally:
                await self._supervisor.close()
                self._tasks.clear()

    async def _update(self, receivers: notify.NotifyClient) -> str:
        """Join and leave as the resources require; returns the problem of the first that cannot join."""
        await self._select()
        due = reaction_rules.receivers(self._rules, self._selected)
        problem = ""
        for name in self._joined.keys() - due.keys():
            await self._leave(receivers.sender(name))
        for name, receiver in due.items():
            if self._joined.get(name) == receiver and name in self._tasks:
                continue
            try:
                await self._join(receivers, name, receiver)
            except errors.Unavailable:
                raise
            except errors.MusterError as error:  # as a model that is not defined yet
                problem = problem or f"{name}: {error}"
        if not self._earlier_left and not self._rule_problem:
            await self._leave_earlier(receivers, due.keys())
            self._earlier_left = True
        return problem

    async def _select(self) -> None:
        """Read the resources of each rule. A rule that cannot be evaluated now, because no resource has an
        attribute that it names, keeps those that still exist; the other rules are not affected.
        """
        self._rule_problem = ""
        for place, rule in enumerate(self._rules):
            try:
                self._selected[place] = await self._fleet.get(where=rule.where)
            except errors.InvalidInput as error:
                self._rule_problem = self._rule_problem or f"reaction {place + 1}: {error}"
                existing = set(await self._fleet.names())
                self._selected[place] = [row for row in self._selected[place] if row.name in existing]

    async def _leave_earlier(self, receivers: notify.NotifyClient, due: Collection[str]) -> None:
        """Remove the receivers of an earlier start whose resources are not selected any more."""
        prefix, after = notify_protocol.participant_id(self._bus.identity, ""), ""
        left: list[str] = []
        while True:
            page = await queries.list_receivers(
                self._bus, prefix=prefix, after=after, limit=PAGE, complete=True
            )
            names = [row.receiver.removeprefix(prefix) for row in page.receivers]
            left += [name for name in names if name not in due]
            if page.next is None:
                break
            after = page.next
        if left:
            events.info("receivers-left", count=len(left), first=left[0])
            await receivers.change([notify_protocol.LeaveReceiver(receiver=name) for name in left])

    async def _join(
        self, receivers: notify.NotifyClient, name: str, receiver: reaction_rules.ResourceReceiver
    ) -> None:
        rule = receiver.rule
        handle = await receivers.advertise(
            name, rule.model, receiver.state, policy=rule.policy, durable=rule.durable
        )
        before = self._joined.get(name)
        self._joined[name] = receiver
        if before is None or before.rule != rule or name not in self._tasks:  # it may be about to leave
            await self._end(name)
            work = functools.partial(execute_commands, handle, name, rule, self._manager)
            self._tasks[name] = self._supervisor.loop(f"commands of {name}", work)

    def _manager(self, sender: str) -> manage.ManageClient:
        return manage.ManageClient(self._bus, on_behalf_of=sender)

    async def _leave(self, handle: notify.ReceiverHandle) -> None:
        await self._end(handle.name)
        await handle.leave()
        del self._joined[handle.name]

    async def _end(self, name: str) -> None:
        task = self._tasks.pop(name, None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def execute_commands(
    receiver: notify.ReceiverHandle,
    resource: str,
    rule: reaction_rules.ReactionSpec,
    manager_for: Callable[[str], manage.ManageClient],
) -> None:
    """Request the operation of each accepted event, as long as the receiver exists.

    ``manager_for`` returns the client that requests operations on behalf of a sender.
    """
    async for event in receiver:
        operation = reaction_rules.requested_operation(rule, event.content)
        if operation is None:
            events.warning("command-not-allowed", resource=resource, event=event.type, id=event.id)
            continue
        manager = manager_for(str(event.sender["_id"]))
        wait_s = RETRY_S
        while not await _request_operation(event, operation, resource, manager) and event.sequence:
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, RETRY_S_MAX)


async def _request_operation(
    event: notify.ReceivedEvent, operation: str, resource: str, manager: manage.ManageClient
) -> bool:
    """Whether the request got a reply."""
    try:
        answers = await manager.exec(operation, resource, id=f"{event.sender['_id']}:{event.id}")
    except errors.MusterError as error:
        events.warning("command-failed", resource=resource, operation=operation, error=str(error))
        return not isinstance(error, errors.Unavailable)
    for answer in answers:
        events.info("command", resource=resource, operation=operation, outcome=answer.outcome)
    return all(
        answer.outcome != messages.DecisionOutcome.IN_DOUBT.value or answer.code == operation_log.IN_DOUBT
        for answer in answers
    )

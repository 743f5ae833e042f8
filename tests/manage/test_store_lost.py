"""The registry's PostgreSQL is down for half a minute, longer than any lease, while the fleet runs."""

from __future__ import annotations

import asyncio
import functools
import secrets
import signal
from typing import Any

import pytest

from muster.core import errors, health
from muster.manage import client
from muster.store import api as store_api
from muster.store import database
from muster.testing.eventually import eventually
from tests import postgres

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LOST_S = 30.0
RESOURCES = 20
PATIENCE_S = 90.0


async def test_managers_go_on_and_what_was_learnt_meanwhile_is_stored_afterwards(fleet):
    with postgres.running() as server:
        named = store_api.StoreOptions(namespace=f"t_{secrets.token_hex(6)}")
        fleet.store = await fleet.stack.enter_async_context(
            await database.open(server.url, settings=named, password=server.password)
        )
        try:
            await _story(fleet, server)
        finally:
            await fleet.stack.aclose()


def _is_up(adapter: Any) -> bool:
    return bool(adapter.state is health.HealthState.UP)


async def _story(fleet: Any, server: postgres.PostgresServer) -> None:
    await fleet.registry("registry-1")
    await fleet.registry("registry-2")
    managers = {name: await fleet.manager(name) for name in ("manager-1", "manager-2")}
    host = await fleet.agent()
    names = [f"r{number}" for number in range(RESOURCES)]
    restart = {"delay_s": 0.05, "delay_s_max": 0.5, "attempts": 1000}
    for name in names:
        await fleet.client.create({"name": name, "type": "memory", "agent": "host-a", "restart": restart})
    for name in names:
        await fleet.client.wait(name, "up")
    epochs = {row.name: (row.epoch, row.manager) for row in await fleet.client.get()}

    await asyncio.to_thread(server.stop, signal.SIGQUIT)
    loop = asyncio.get_running_loop()
    back_at = loop.time() + LOST_S
    refused, falls = 0, dict.fromkeys(names, 0)
    impatient = client.ManageClient(fleet.client._bus, timeout_s=5.0)
    while loop.time() < back_at:
        # What should be cannot change …
        with pytest.raises(errors.MusterError):
            await impatient.put(names[0], config={"value": "never"})
        refused += 1
        # … what falls is put back …
        name = names[refused % RESOURCES]
        adapter = host.hosted[name].adapter
        adapter.die("oops")
        falls[name] += 1
        await eventually(functools.partial(_is_up, adapter), timeout_s=30)
        # … operations are carried out, and questions answered.
        assert (await impatient.exec("echo", names[1], arguments={"text": "x"}))[0].result == "x"
        assert len(await impatient.get()) == RESOURCES
        assert all(boss.may_act for boss in managers.values()), "their renewals hold"
    assert refused >= 3
    # A manager lost meanwhile is replaced as soon as that can be written down.
    await managers["manager-2"].abandon()
    await asyncio.to_thread(server.start)

    async def taken_over() -> bool:
        rows = await fleet.client.get()
        return all(row.manager == "manager-1" and row.state == "up" for row in rows)

    await eventually(taken_over, timeout_s=PATIENCE_S)
    for row in await fleet.client.get():
        epoch, manager = epochs[row.name]
        assert (row.epoch > epoch) is (manager == "manager-2"), row

    async def caught_up() -> bool:
        """What the manager that lives has seen; what the other had seen went with it."""
        rows = {row.name: row for row in await fleet.client.get()}
        mine = [name for name in names if epochs[name][1] == "manager-1"]
        return all(rows[name].restarts == falls[name] for name in mine)

    await eventually(caught_up, timeout_s=PATIENCE_S)
    assert (await fleet.client.describe(names[0])).spec.config == {}, "what was refused was not done"
    await fleet.client.put(names[0], config={"value": "now"})
    await eventually(lambda: host.hosted[names[0]].adapter.config.value == "now", timeout_s=PATIENCE_S)

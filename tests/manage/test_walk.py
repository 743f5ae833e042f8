"""A process under real management: it starts, is restarted after a kill, and survives its managers."""

from __future__ import annotations

import os
import signal
from typing import Any

from muster.core import errors
from muster.manage import protocol
from muster.testing.eventually import eventually


def pid_of(host: Any) -> Any:
    return host.hosted["sleeper"].observed.properties.get("pid")


def is_alive(pid: int | None) -> bool:
    if pid is None:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_process_comes_up_is_put_back_and_survives_its_manager(fleet, process_manifest):
    await fleet.registry()
    first = await fleet.manager("manager-1")
    host = await fleet.agent()
    applied = await fleet.client.apply(process_manifest())
    assert applied.changed == ["sleeper"]
    row = await fleet.client.wait("sleeper", "up")
    assert row.manager == "manager-1"
    pid = pid_of(host)
    assert is_alive(pid)

    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: is_alive(pid_of(host)) and pid_of(host) != pid)
    await eventually(lambda: first.managed["sleeper"].runtime.health.state.value == "up")

    async def restarted():
        row = (await fleet.client.get("sleeper"))[0]
        return row.state == "up" and row.restarts == 1

    await eventually(restarted)
    pid = pid_of(host)

    second = await fleet.manager("manager-2")
    await first.abandon()
    await eventually(
        lambda: "sleeper" in second.managed and host.hosted["sleeper"].record.manager == "manager-2"
    )
    now = (await fleet.client.get("sleeper"))[0]
    assert now.manager == "manager-2"
    assert now.epoch > row.epoch
    late = protocol.Operation(
        id="late", verb=protocol.Verb.EXECUTE, resource="sleeper", epoch=row.epoch, operation="stop"
    )
    answer = await host.execute(late)
    assert answer.code == errors.StaleEpoch.code
    assert answer.epoch == now.epoch
    assert is_alive(pid)
    assert pid_of(host) == pid, "the process did not notice"

    await fleet.client.delete("sleeper")
    await fleet.client.wait_gone("sleeper")
    assert not is_alive(pid)

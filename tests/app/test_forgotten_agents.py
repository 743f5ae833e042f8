"""The credentials of forgotten agents end when nothing is left on their machines."""

from __future__ import annotations

import types
from typing import Any

import pytest

from muster.app.components import management
from muster.app.operations import control
from muster.bus.rpc import server
from muster.core import errors
from muster.manage import client, rows, settings
from muster.trust import keyring
from muster.trust.permissions import roles


class FakeFleet:
    """The registry, as the component sees it."""

    def __init__(self) -> None:
        self.agents: dict[str, bool] = {}  # by name: whether it reported to host nothing

    async def forgotten(self) -> list[rows.ForgottenAgent]:
        return [rows.ForgottenAgent(name=name, is_empty=empty) for name, empty in self.agents.items()]

    async def forget(self, name: str, *, is_revoked: bool) -> None:
        assert is_revoked
        del self.agents[name]


@pytest.fixture
def world(tmp_path, monkeypatch) -> Any:
    trust, fleet = keyring.Keyring.create(tmp_path / "trust", "north"), FakeFleet()
    for name in ("host-a", "host-b", "local"):
        trust.issue(name, roles.Role.AGENT)
    monkeypatch.setattr(client, "ManageClient", lambda *_: fleet)
    part = management.ManagementComponent(settings.ManageSettings())
    part._context = types.SimpleNamespace(  # type: ignore[assignment]
        trust=trust, bus=None, folder=types.SimpleNamespace(running=lambda: None)
    )
    return types.SimpleNamespace(part=part, trust=trust, fleet=fleet)


def status(world: Any, name: str) -> str:
    return str(world.trust.show(name).status)


async def test_the_credentials_end_when_the_agent_has_reported_to_host_nothing(world):
    world.fleet.agents = {"host-a": False, "elsewhere": True}
    await world.part._revoke_forgotten()
    assert status(world, "host-a") == "valid", "without them it could not be told to delete anything"
    assert set(world.fleet.agents) == {"host-a", "elsewhere"}
    world.fleet.agents["host-a"] = True
    await world.part._revoke_forgotten()
    assert (status(world, "host-a"), status(world, "host-b")) == ("revoked", "valid")
    assert set(world.fleet.agents) == {"elsewhere"}


async def test_an_operator_can_end_them_at_once(world):
    world.fleet.agents = {"host-a": False}
    world.trust.revoke("host-a")
    await world.part._revoke_forgotten()
    assert world.fleet.agents == {}


async def test_the_agent_of_this_machine_keeps_its_credentials(world):
    world.fleet.agents = {"local": True}
    await world.part._revoke_forgotten()
    assert (status(world, "local"), world.fleet.agents) == ("valid", {})


async def test_a_revoked_operator_may_nothing_also_while_it_is_connected(world):
    world.trust.issue("ann", roles.Role.OPERATOR)
    brokers = object.__new__(control.ControlServer)
    brokers._context = world.part._context
    call: Any = types.SimpleNamespace(identity="ann")
    requests = (world.part, f"{management.KIND}.kill"), (brokers, "request.add")
    for part, name in requests:
        await part._authorize(call, server.RpcOperation(name, world.fleet.forgotten), {})
    world.trust.revoke("ann")
    for part, name in requests:
        with pytest.raises(errors.Forbidden, match="only an operator may"):
            await part._authorize(call, server.RpcOperation(name, world.fleet.forgotten), {})

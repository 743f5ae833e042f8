"""The processes of several machines in one domain have different identities."""

from __future__ import annotations

import types
from typing import Any

import pytest

from muster.app import settings as app_settings
from muster.app.components import factories, information_nodes, management, notifier
from muster.core.settings import loader


class Connected(Exception):
    """Ends the start of a component at its connection."""


async def identities(agent_name: str) -> set[str]:
    settings = loader.load(
        app_settings.Settings, flags={"manage.agent_name": agent_name, "inform.processes": False}
    )
    names = set(management._names(settings.manage, settings.manage.managers))

    async def connect(identity: str, _: Any) -> None:
        names.add(identity)
        raise Connected

    context: Any = types.SimpleNamespace(connect=connect, settings=settings, storage_problem=str)
    for part in factories.components(settings):
        if isinstance(part, notifier.NotifierComponent | information_nodes.InformationNodesComponent):
            with pytest.raises(Connected):
                await part.start(context)
    return names


async def test_machines_of_one_zone_share_no_identity():
    """Notifiers of one name ignore each other's events, and nodes of one name each other's replicas."""
    here, there = await identities("a"), await identities("b")
    assert len(here) == len(there) == 7
    assert not here & there
    assert {"notifier", "inform-default-1", "manager-1"} <= await identities("local")

"""A domain that is started by commands as a user would start it, and clients of it."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

from muster.app import home
from muster.app import settings as app_settings
from muster.bus.client import client as bus_client
from muster.bus.http import client as http_client
from muster.core.settings import loader
from muster.trust import keyring
from muster.trust.permissions import roles
from tests.cli import driver


class Drill:
    """``servers``: the brokers that clients try."""

    def __init__(self, folder: Path) -> None:
        self.home = folder
        self.servers: list[str] = []
        self._stack = contextlib.AsyncExitStack()

    def settings(self) -> app_settings.Settings:
        return loader.load(app_settings.Settings, file=self.home / "muster.toml")

    def keyring(self) -> keyring.Keyring:
        return keyring.Keyring.open(self.settings().keys_folder)

    async def command(self, *arguments: str) -> driver.Answer:
        answer = await asyncio.to_thread(driver.run, *arguments, home=self.home)
        if answer.code:
            raise RuntimeError(f"muster {' '.join(arguments)}: {answer.out}{answer.err}")
        return answer

    async def status(self) -> dict[str, Any]:
        running = await asyncio.to_thread(home.DomainFolder(self.settings().domain.folder).running)
        assert running is not None
        page: dict[str, Any] = (await http_client.get(f"{running.health_url}/status", timeout_s=10.0)).json()
        return page

    async def _connect(self, identity: str, role: roles.Role, first: str) -> bus_client.NatsBus:
        """A client whose first broker is ``first``; it is closed with the drill."""
        trust = self.keyring()
        if identity not in [record.identity for record in trust.records()]:
            await asyncio.to_thread(trust.issue, identity, role)
        servers = [first, *(url for url in self.servers if url != first)]
        bus = await bus_client.connect(servers, creds=trust.credentials(identity), in_order=True)
        self._stack.push_async_callback(bus.close)
        return bus

"""The secrets of a domain among the registry's records, and their delivery to agents (`manage.secrets`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from muster.core import errors, subjects
from muster.core.settings import loader
from muster.manage import protocol, rows, secrets
from muster.manage.registry import assignments, views
from muster.trust import sealed_box

if TYPE_CHECKING:
    from muster.manage.registry import endpoint

SECRETS = "manage.secrets"
USERS_MAX = 100  # resources listed for a secret; all are counted
BOX_CHARACTERS_MAX = 2 * loader.MAX_SECRET_BYTES

OpenKey = Callable[[], sealed_box.SealedBoxKey]  # reads files


def users(state: assignments.AssignmentProcessor) -> dict[str, list[str]]:
    """For each secret, the resources that refer to it, in the order of their names."""
    by_secret: dict[str, list[str]] = {}
    for name in state.sorted_names:
        for secret in set(secrets.references(state.resources[name].spec.config)):
            by_secret.setdefault(secret, []).append(name)
    return by_secret


def _row(name: str, sealed: secrets.SealedSecret, using: list[str]) -> rows.SecretRow:
    return rows.SecretRow(
        name=name,
        by=sealed.by,
        at_ms=sealed.at_ms,
        used_by=using[:USERS_MAX],
        used_by_count=len(using),
    )


class SecretStore:
    def __init__(self, registry: endpoint.RegistryEndpoint, open_key: OpenKey | None) -> None:
        self._registry = registry
        self._open_key = open_key
        self._key: sealed_box.SealedBoxKey | None = None

    async def public_key(self) -> str:
        """The key for which values are to be sealed."""
        return (await self._opened_key()).public

    async def put(self, by: str, name: str, box: str) -> rows.SecretRow:
        """Store a secret. Returns the resources that use it; they get the new value at their next start."""
        subjects.token(name)
        if len(box) > BOX_CHARACTERS_MAX:
            raise errors.LimitExceeded(f"a secret has at most {loader.MAX_SECRET_BYTES} bytes")
        key = await self._opened_key()
        key.open(box, secrets.storage_context(name))  # reject a box that cannot be opened
        sealed = secrets.SealedSecret(box=box, by=by, at_ms=int(time.time() * 1000))
        async with self._registry.writing() as state:
            await self._registry.write([(SECRETS, name, msgspec.json.encode(sealed))])
            return _row(name, sealed, (await asyncio.to_thread(users, state)).get(name, []))

    async def row(self, name: str) -> rows.SecretRow:
        """Who set it and when, and which resources use it."""
        sealed, state = self._get(name), self._registry.state.snapshot()
        return _row(name, sealed, (await asyncio.to_thread(users, state)).get(name, []))

    async def delete(self, by: str, name: str) -> rows.SecretDeleted:
        async with self._registry.writing() as state:
            self._get(name)
            using = (await asyncio.to_thread(users, state)).get(name)
            if using:
                raise errors.Conflict(
                    f"{', '.join(using[:5])} refer(s) to the secret {name!r}",
                    hint="change or delete them first",
                )
            await self._registry.write([(SECRETS, name, None)])
        return rows.SecretDeleted(deleted=name)

    async def page(self, after: str = "", limit: int = views.PAGE) -> dict[str, Any]:
        """A page of names, never values."""
        records = self._registry.log.scan(SECRETS, after=after, limit=limit + 1)
        values = {record.key: record.value for record in records}
        using = await asyncio.to_thread(users, self._registry.state.snapshot())

        def row(name: str) -> rows.SecretRow:
            sealed = msgspec.json.decode(values[name], type=secrets.SealedSecret)
            return _row(name, sealed, using.get(name, []))

        return views.page(values, row, limit)

    def check(self, specs: list[protocol.ResourceSpec]) -> None:
        """Check that the secrets these specifications refer to exist."""
        referrers = {name: spec.name for spec in specs for name in secrets.references(spec.config)}
        for name, resource in referrers.items():
            if self._registry.log.get(SECRETS, subjects.token(name)) is None:
                raise errors.InvalidInput(
                    f"{resource!r} refers to the secret {name!r}, which is not in the store",
                    hint=f"`muster secret set {name}`",
                )

    async def deliver(self, agent: str, resource: str, name: str, key: str) -> dict[str, str]:
        """Seal the secret for the agent's ``key``, if it hosts ``resource`` and that refers to the secret."""
        known = self._registry.state.resources.get(resource)
        if known is None or known.spec.agent != agent or name not in secrets.references(known.spec.config):
            raise errors.Forbidden(f"no resource {resource!r} of {agent} refers to the secret {name!r}")
        opened = (await self._opened_key()).open(self._get(name).box, secrets.storage_context(name))
        return {"box": sealed_box.seal(key, opened, secrets.delivery_context(agent, resource, name))}

    def _get(self, name: str) -> secrets.SealedSecret:
        record = self._registry.log.get(SECRETS, name)
        if record is None:
            raise errors.NotFound(f"no secret {name!r} in the store", hint=f"`muster secret set {name}`")
        return msgspec.json.decode(record.value, type=secrets.SealedSecret)

    async def _opened_key(self) -> sealed_box.SealedBoxKey:
        if self._open_key is None:
            raise errors.MissingDependency("this registry has no key for secrets")
        if self._key is None:
            self._key = await asyncio.to_thread(self._open_key)
        return self._key

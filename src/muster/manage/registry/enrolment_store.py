"""The enrolment tokens of the domain among the registry's records.

The machine with the signing keys issues and redeems them (`muster.app.enrolment`). It may not run the active
registry, so it reads and writes them by request.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec

from muster.core import errors
from muster.manage import rows
from muster.manage.registry import registry_log, views

if TYPE_CHECKING:
    from muster.manage.registry import endpoint

TOKENS = "manage.tokens"


class EnrolmentStore:
    def __init__(self, registry: endpoint.RegistryEndpoint) -> None:
        self._registry = registry

    async def page(self, after: str = "", limit: int = views.PAGE) -> dict[str, Any]:
        stored = self._registry.log.scan(TOKENS, after=after, limit=limit + 1)
        by_token = {record.key: record for record in stored}
        return views.page(by_token, lambda token: _row(token, by_token[token]), limit)

    async def row(self, token: str) -> rows.EnrolmentRow:
        record = self._registry.log.get(TOKENS, token)
        if record is None:
            raise errors.NotFound(f"no enrolment token {token!r}")
        return _row(token, record)

    async def put(self, by: str, token: str, enrolment: rows.Enrolment, version: int) -> rows.EnrolmentRow:
        """Store it if ``version`` is still the present one; 0: it does not exist. A new one replaces those
        that expired long ago."""
        async with self._registry.writing():
            known = self._registry.log.get(TOKENS, token)
            if (known.version if known else 0) != version:
                raise errors.Conflict("this token is being used concurrently")
            old = [] if version else self._expired()
            expired = [(TOKENS, each, None) for each in old]
            await self._registry.write([*expired, (TOKENS, token, msgspec.json.encode(enrolment))])
            return await self.row(token)

    def _expired(self) -> list[str]:
        limit_s = time.time() - rows.ENROLMENT_KEPT_S
        return [
            record.key
            for record in self._registry.log.scan(TOKENS)
            if _row(record.key, record).enrolment.expires_at_s < limit_s
        ]


def _row(token: str, record: registry_log.RegistryRecord) -> rows.EnrolmentRow:
    enrolment = msgspec.json.decode(record.value, type=rows.Enrolment)
    return rows.EnrolmentRow(token=token, enrolment=enrolment, version=record.version)

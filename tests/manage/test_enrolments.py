"""The registry keeps enrolment tokens for the domain's own process, and for nothing else."""

from __future__ import annotations

import time

import pytest

from muster.app.supervisor import worker
from muster.core import errors
from muster.manage import client, rows
from muster.trust.permissions import roles


def enrolment(name: str, *, age_s: float = 0.0) -> rows.Enrolment:
    return rows.Enrolment(name=name, by="ann", expires_at_s=time.time() + 60 - age_s, approved=False)


async def test_a_token_changes_only_from_the_version_that_was_read(fleet):
    await fleet.registry()
    assert await fleet.client.enrolment("join-1") is None
    stored = await fleet.client.set_enrolment("join-1", enrolment("a"), version=0)
    assert await fleet.client.enrolment("join-1") == stored
    changed = await fleet.client.set_enrolment("join-1", enrolment("b"), version=stored.version)
    for version in (0, stored.version):
        with pytest.raises(errors.Conflict, match="used concurrently"):
            await fleet.client.set_enrolment("join-1", enrolment("c"), version=version)
    assert await fleet.client.enrolments() == [changed]


async def test_another_registry_has_them(fleet):
    async with await fleet.registry("registry-1"):
        stored = await fleet.client.set_enrolment("join-1", enrolment("a"), version=0)
    await fleet.registry("registry-2")
    assert await fleet.client.enrolment("join-1") == stored


async def test_a_new_token_replaces_those_that_expired_long_ago(fleet):
    await fleet.registry()
    for token, age_s in (("join-1", rows.ENROLMENT_KEPT_S + 61), ("join-2", rows.ENROLMENT_KEPT_S - 60)):
        await fleet.client.set_enrolment(token, enrolment("a", age_s=age_s), version=0)
    await fleet.client.set_enrolment("join-3", enrolment("b"), version=0)
    assert [row.token for row in await fleet.client.enrolments()] == ["join-2", "join-3"]


async def test_only_the_domains_own_process_reads_or_changes_them(fleet, trust):
    trust.issue("ann", roles.Role.OPERATOR)
    trust.issue("boot", roles.Role.BOOTSTRAP)
    await fleet.registry(authorize=worker.RequestAuthorizer(trust.folder))
    for attempt in (
        fleet.client.enrolments(),
        fleet.client.enrolment("join-1"),
        fleet.client.set_enrolment("join-1", enrolment("a"), version=0),
    ):
        with pytest.raises(errors.Forbidden, match="only the role bootstrap"):
            await attempt
    own = client.ManageClient(await fleet.connect("boot"))
    stored = await own.set_enrolment("join-1", enrolment("a"), version=0)
    assert await own.enrolments() == [stored]

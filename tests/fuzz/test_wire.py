"""A short run of hostile messages through a real broker, with the credentials of each role."""

from __future__ import annotations

from tests.fuzz import wire


async def test_no_role_disturbs_another_connection_or_chooses_its_handler(tmp_path):
    victims = await wire.fuzz(tmp_path, 6_000)
    assert victims.problems == []
    assert victims.served > 3
    assert victims.received > 300

"""The drill itself: a frozen process is replaced, and every workload continues."""

from __future__ import annotations

import pytest

from tests.faults import outages

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.mark.parametrize("target", outages.TARGETS)
async def test_every_workload_continues_after_a_process_froze(target: str):
    (result,) = await outages.main([target], ["freeze"])
    assert result["replaced_s"] is not None
    assert "silent" in result["states"]
    assert max(result["longest_wait_s"].values()) < outages.RECOVERY_S_MAX

"""The page shows the stored storm; and a small one, in which nothing may be given up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.storm import __main__ as storm
from tests.storm import domain
from tools import site


def test_the_page_shows_the_stored_result():
    assert storm.markdown(json.loads(storm.FILE.read_text())) in site.text_of("reliability.md")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.may_block(reason="the drill reads settings and keys between its steps")
async def test_a_fleet_is_back_after_a_broker_restart(tmp_path: Path):
    done = await domain.storm(tmp_path, 200, 2_000, 2)
    assert done.is_over, done
    assert done.broker_restarts == 1
    assert done.reports_lost == 0
    assert done.attempts <= 10 * done.agents, "paced: each agent tried a few times"

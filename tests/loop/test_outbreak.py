"""The worm demo, small and seeded: the complete loop, with a manager and a broker killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from muster.app import domain
from muster.app import settings as app_settings
from muster.app.components import factories
from muster.core.settings import loader
from muster.demo import outbreak, scenario, worm


@pytest.mark.timeout(1200)
@pytest.mark.may_block(reason="a domain's first start reads files")
async def test_a_worm_is_detected_reported_and_stopped_while_processes_are_killed(tmp_path: Path):
    plan = worm.WormPlan(servers=600, first_infected=6, attempts_s=0.05, seed=3)
    options = scenario.ScenarioOptions(plan=plan, farms=2, period_s=4.0, delay_s=6.0, start_s_max=480.0)
    scenario.prepare(tmp_path)
    flags = {
        **scenario.flags(tmp_path, options),
        "domain.data_dir": str(tmp_path / "data"),
        "pipeline.master": "local[1]",
    }
    chosen = loader.load(app_settings.Settings, flags=flags)
    lines: list[str] = []
    async with (
        domain.Domain(chosen, components=factories.components(chosen)) as running,
        outbreak.Outbreak(running, options, lambda name, line, _: lines.append(f"{name}: {line}")) as story,
    ):
        result = await story.run()

    with_hole = int(worm.WormFarm(plan).has_hole.sum())
    assert plan.first_infected <= result.fallen < with_hole, lines
    assert result.unhindered > result.fallen
    assert result.saved > 0
    # Every command that a policy accepted was carried out once, though a manager and a broker died.
    assert result.killed[0].startswith("manager-"), lines
    assert result.killed[1].startswith("broker "), lines
    assert result.failovers > 0
    assert result.not_done == 0
    assert result.repeated == 0
    assert result.deliveries == result.operations > result.fallen
    assert result.forged_reached == 0
    assert result.reports > plan.servers
    assert 0 < result.detect_s <= result.contain_s <= result.heal_s


async def test_progress_is_reported_once_for_each_number(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(outbreak, "WAITING_S", 0.0)
    lines: list[str] = []
    domain_: Any = None
    story = outbreak.Outbreak(domain_, scenario.ScenarioOptions(), lambda _, line, __: lines.append(line))
    for count in (0, 0, 0, 5, 5):
        story._mention("reported to Spark", count)
    assert [line.split()[0] for line in lines] == ["0", "5"]

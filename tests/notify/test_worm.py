from __future__ import annotations

from examples import worm


async def test_the_worm_scenario_of_the_paper(tmp_path):
    lines: list[str] = []
    outcome = await worm.run(tmp_path, lines.append, servers=24)
    assert outcome.reached[outcome.alert] == outcome.meant_alert
    assert outcome.reached[outcome.command] == outcome.meant_command
    assert outcome.meant_alert
    assert "web-1" in outcome.meant_command
    assert outcome.refused == ["restricted-claim", "forbidden", "forbidden"]
    assert not any(outcome.reached.get(event) for event in outcome.forged)

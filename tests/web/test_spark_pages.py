"""The pages that Spark fills, with a real one at work: overview, reports, alerts, history, pipeline."""

from __future__ import annotations

import asyncio

import pytest

from muster.testing import child_process
from tests.web import conftest
from tests.web.test_pages import serious

EXTRA = """
[pipeline]
enabled = true
master = "local[1]"
trigger_s = 2.0
window_s = 5.0
delay_s = 3.0
rules = "{rules}"
"""
RULES = """\
rules:
  - name: busy
    scope: group
    when: cpu_percent_mean > 0
    severity: warning
    summary: "{about} is at {value:.0f} %"
"""
WAIT_S = 240.0  # a busy machine starts Spark in a minute
DRAWN = "document.querySelectorAll('figure.plot .uplot')"
#: What a page must come to show by itself, as an expression over its document.
SHOWN = {
    "/": f"{DRAWN}.length >= 3 && document.querySelector('#alerts tbody tr')"
    " && document.querySelector('.fleet-map').dataset.drawn === '501'",
    "/machines": "document.querySelectorAll('main tbody tr').length >= 5",
    "/group?name=g1": "document.querySelectorAll('main tbody tr').length >= 5",
    "/alerts": "document.querySelectorAll('main tbody tr').length >= 5",
    "/history?metric=cpu_percent&last=15m": f"{DRAWN}.length === 1"
    " && document.querySelectorAll('#rows tbody tr').length === 50",
    "/pipeline": f"{DRAWN}.length === 3 && document.querySelector('#progress').innerText.includes('running')",
    "/report-delay": f"{DRAWN}.length >= 1",
}


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_pages_show_what_spark_made_of_the_fleet(tmp_path, browser):
    rules = tmp_path / "rules.yaml"
    rules.write_text(RULES)
    running = await asyncio.to_thread(conftest.start, tmp_path / "home", EXTRA.format(rules=rules))
    try:
        fleet = await child_process.start_muster(
            *("simulate", "sensors", "--machines", "500", "--groups", "5", "--period", "2s"),
            env={"MUSTER_HOME": str(running.place)},
        )
        async with fleet:
            for scheme, width in (("light", 1280), ("dark", 1280), ("light", 360)):
                page = await browser.new_page(viewport={"width": width, "height": 850}, color_scheme=scheme)
                here = conftest.Visit(running, page)
                await here.login("vera")
                for path, shown in SHOWN.items():
                    await here.open(path)
                    await here.until(f"Boolean({shown})", timeout_s=WAIT_S)
                    await here.live()
                    assert await serious(page) == [], path
                    wide = await page.evaluate("document.documentElement.scrollWidth")
                    assert wide <= width, path
                    name = path.split("?")[0].strip("/") or "overview"
                    await here.keep(f"spark-{name}-{scheme}-{width}")
                # The history goes on behind its first page, and back in time.
                await here.open("/history?metric=cpu_percent&last=15m")
                await here.live()
                first = await here.page.get_attribute("#rows tbody tr:first-child time", "datetime")
                await here.page.click("#rows a[rel=next]")
                await here.live()
                assert await here.page.get_attribute("#rows tbody tr:first-child time", "datetime") <= first
                assert await here.page.locator("#rows tbody tr").count() == 50
                assert here.complaints == []
                await page.close()
    finally:
        await asyncio.to_thread(conftest.stop, running)

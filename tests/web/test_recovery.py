"""A page that is left open while the domain restarts."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest

from muster.testing import child_process
from tests.web import conftest


@pytest.mark.timeout(300)
async def test_pages_left_open_while_the_domain_restarts_recover_by_themselves(tmp_path, browser):
    """One served by the domain's own web process, which restarts with it, and one by `muster run web`."""
    running = conftest.start(tmp_path / "home")
    try:
        with conftest.Api(running, "olga") as olga:
            kept = {"value": "still there"}
            conftest.wait_until(lambda: olga.put("/contexts/kept", json=kept).status_code == 200)
        standing = await child_process.start_muster(
            "run", "web", "--set", "web.port=0", env={"MUSTER_HOME": str(running.place)}
        )
        async with standing:
            url = (await standing.line(r"web is up: (\S+);", timeout_s=60))[1]
            own, apart = [
                conftest.Visit(item, await (await browser.new_context()).new_page())
                for item in (running, conftest.Running(running.place, url))
            ]
            for here in (own, apart):
                await here.login("vera")
                await here.open("/contexts")
                await here.live(timeout_s=60)
            conftest.stop(running)
            await own.until("document.getElementById('live-state').textContent === 'reconnecting'")
            await apart.until("document.getElementById('live-state').textContent === 'domain away'")
            assert "muster up" in await apart.page.inner_text("main")
            await apart.keep("domain-away")
            with conftest.Api(conftest.Running(running.place, url), "olga") as olga:
                assert olga.get("/alerts").status_code == 503  # and not: there are none
                assert "alerts" in olga.get("/overview").json()["missing"]
            await apart.open("/")
            await apart.page.wait_for_selector("#alerts >> text=muster up", timeout=60_000)
            assert "no alerts" not in await apart.page.inner_text("main")
            await apart.open("/contexts")
            conftest.start(running.place, port=urlsplit(running.url).port or 0)
            for here in (own, apart):
                await here.live(timeout_s=90)
                await here.page.wait_for_selector("#rows >> text=still there", timeout=60_000)
    finally:
        conftest.stop(running)

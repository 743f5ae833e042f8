"""Take the README's picture of the dashboard: `make picture`, or `python -m tests.web.picture FILE [FLEET]`.

The worm's story is played, and the overview is photographed in Chromium when the outbreak has been contained
and the fleet is being healed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.cli import driver
from tests.web.conftest import CHROMIUM, CHROMIUM_ARGUMENTS

FLEET = 10_000
WIDTH, HEIGHT = 1280, 960
STORY_S_MAX = 900.0
AFTER = "contained"  # the scene after which the picture is taken
SETTLE_S = 10.0  # so that Spark's reports show it too


async def scene(process: asyncio.subprocess.Process, name: str) -> dict[str, Any]:
    """The story goes on to this scene."""
    assert process.stdout is not None
    while line := await process.stdout.readline():
        details: dict[str, Any] = json.loads(line)
        sys.stderr.write(f"{details['scene']:>10}  {details.get('text', '')}\n")
        if details["scene"] == name:
            return details
    raise RuntimeError(f"the story ended before {name!r}")


async def take(file: Path, fleet: int) -> None:
    from playwright import async_api

    with tempfile.TemporaryDirectory(prefix="muster-picture-") as folder:
        words = driver.command_line("demo", "worm", "--once", "--fleet", str(fleet), "-o", "json")
        process = await asyncio.create_subprocess_exec(
            *words,
            env=driver.environment(Path(folder) / "home"),
            stdout=asyncio.subprocess.PIPE,
            limit=16 << 20,  # the last line holds the whole curve
        )
        try:
            async with asyncio.timeout(STORY_S_MAX), async_api.async_playwright() as chromium:
                reported = await scene(process, "dashboard")
                browser = await chromium.chromium.launch(
                    executable_path=str(CHROMIUM), args=list(CHROMIUM_ARGUMENTS)
                )
                page = await browser.new_page(
                    viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light"
                )
                await page.goto(f"{reported['url']}/login")
                await page.fill("#f-name", "admin")
                await page.fill("#f-password", reported["password"])
                await page.click("button[type=submit]")
                await scene(process, AFTER)
                await asyncio.sleep(SETTLE_S)  # pace of the story
                await page.screenshot(path=str(file))
                await browser.close()
                await scene(process, "summary")
                await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()
    size = (await asyncio.to_thread(file.stat)).st_size
    sys.stderr.write(f"{file}: {size:,} bytes\n")


if __name__ == "__main__":
    place, *more = sys.argv[1:]
    asyncio.run(take(Path(place), int(more[0]) if more else FLEET))

"""Take the README's pictures of the dashboard: `make picture`, or `python -m tests.web.picture FOLDER`.

The worm's story is played. The overview is photographed in Chromium about every second, light and dark, from
the release of the worm until the fleet is healthy. The picture (`overview.png`, `overview-dark.png`) is the
moment with most servers both infected and isolated; `worm.webp` shows the whole outbreak in a few seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from tests.cli import driver
from tests.web.conftest import CHROMIUM, CHROMIUM_ARGUMENTS

FLEET = 10_000
ATTACKS = "0.3"  # per second of each infected server: a fast worm is seen best
WIDTH, HEIGHT = 1280, 960
STORY_S_MAX = 900.0
FRAME_S = 0.8
AFTER_S = 6.0  # so that reports show the end too
SCHEMES = ("light", "dark")
MOVING_WIDTH, MOVING_MS, MOVING_BYTES_MAX = 860, 160, 600_000
#: The numbers of infected and isolated servers on the map; null while it is not drawn.
COUNTS = """() => {
  const {map, values} = document.querySelector(".fleet-map")?.fleetMap || {};
  if (!map) return null;
  const count = (state) => values.reduce((sum, code) => sum + (map.states[code] === state), 0);
  return [count("failed"), count("draining")];
}"""


@dataclass
class Frame:
    infected: int
    isolated: int
    pictures: dict[str, bytes]  # PNG, by colour scheme


async def follow(process: asyncio.subprocess.Process, until: str) -> dict[str, Any]:
    """The story goes on to this scene."""
    assert process.stdout is not None
    while line := await process.stdout.readline():
        details: dict[str, Any] = json.loads(line)
        sys.stderr.write(f"{details['scene']:>10}  {details.get('text', '')}\n")
        if details["scene"] == until:
            return details
    raise RuntimeError(f"the story ended before {until!r}")


async def open_overview(browser: Any, scheme: str, reported: dict[str, Any]) -> Any:
    page = await browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=scheme)
    await page.goto(f"{reported['url']}/login")
    await page.fill("#f-name", "admin")
    await page.fill("#f-password", reported["password"])
    await page.click("button[type=submit]")
    await page.wait_for_selector("#live-state")
    return page


async def film(pages: dict[str, Any], frames: list[Frame]) -> None:
    """Photograph until cancelled."""
    while True:
        began_s = time.monotonic()
        counts = await pages["light"].evaluate(COUNTS)
        if counts is not None:
            shots = await asyncio.gather(*(page.screenshot() for page in pages.values()))
            infected, isolated = counts
            frames.append(Frame(infected, isolated, dict(zip(pages, shots, strict=True))))
        await asyncio.sleep(max(0.05, FRAME_S - (time.monotonic() - began_s)))  # pace of the film


async def record(fleet: int) -> list[Frame]:
    from playwright import async_api

    frames: list[Frame] = []
    with tempfile.TemporaryDirectory(prefix="muster-picture-") as folder:
        words = driver.command_line(
            "demo", "worm", "--once", "--fleet", str(fleet), "--attacks", ATTACKS, "-o", "json"
        )
        process = await asyncio.create_subprocess_exec(
            *words,
            env=driver.environment(Path(folder) / "home"),
            stdout=asyncio.subprocess.PIPE,
            limit=16 << 20,  # the last line holds the whole curve
        )
        try:
            async with asyncio.timeout(STORY_S_MAX), async_api.async_playwright() as chromium:
                reported = await follow(process, "dashboard")
                browser = await chromium.chromium.launch(
                    executable_path=str(CHROMIUM), args=list(CHROMIUM_ARGUMENTS)
                )
                pages = {scheme: await open_overview(browser, scheme, reported) for scheme in SCHEMES}
                await follow(process, "worm")
                filming = asyncio.create_task(film(pages, frames))
                await follow(process, "healthy")
                await asyncio.wait((filming,), timeout=AFTER_S)
                filming.cancel()
                await asyncio.gather(filming, return_exceptions=True)
                await browser.close()
                await follow(process, "summary")
                await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()
    return frames


def animation(frames: list[Frame]) -> bytes:
    """The frames as a WebP, as good as the limit of its size permits."""
    images, made = [], b""
    for frame in frames:
        image = Image.open(io.BytesIO(frame.pictures["light"])).convert("RGB")
        images.append(image.resize((MOVING_WIDTH, round(image.height * MOVING_WIDTH / image.width))))
    for quality in (80, 65, 50, 35, 20):
        out = io.BytesIO()
        images[0].save(
            out,
            "WEBP",
            save_all=True,
            append_images=images[1:],
            duration=[MOVING_MS] * (len(images) - 1) + [2500],
            loop=0,
            quality=quality,
            method=4,
        )
        made = out.getvalue()
        if len(made) <= MOVING_BYTES_MAX:
            break
    return made


def small_png(picture: bytes) -> bytes:
    """With a palette, a third of the size; the pages have few colours."""
    out = io.BytesIO()
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    image.quantize(128, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(
        out, "PNG", optimize=True
    )
    return out.getvalue()


def take(folder: Path, fleet: int) -> None:
    frames = asyncio.run(record(fleet))
    best = max(
        frames, key=lambda frame: (min(frame.infected, frame.isolated), frame.infected + frame.isolated)
    )
    sys.stderr.write(f"{len(frames)} frames; best: {best.infected} infected, {best.isolated} isolated\n")
    folder.mkdir(parents=True, exist_ok=True)
    made = {
        "overview.png": small_png(best.pictures["light"]),
        "overview-dark.png": small_png(best.pictures["dark"]),
        "worm.webp": animation(frames),
    }
    for name, data in made.items():
        (folder / name).write_bytes(data)
        sys.stderr.write(f"{folder / name}: {len(data):,} bytes\n")


if __name__ == "__main__":
    place, *more = sys.argv[1:]
    take(Path(place), int(more[0]) if more else FLEET)

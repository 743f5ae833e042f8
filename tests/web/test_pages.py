"""The dashboard in a real Chromium: every page, live, by keyboard, light and dark, wide and narrow."""

from __future__ import annotations

import io
import os
import re
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.async_playwright import Axe
from PIL import Image, ImageChops, ImageStat

from muster.testing import child_process
from tests.web import conftest
from tests.web.conftest import Api, wait_until

NASTY = "<img src=x onerror=alert(1)><script>alert(1)</script>"
PAGES = {
    "/": "Overview",
    "/map": "Map",
    "/find?q=kept": "Search",
    "/apply": "Apply a manifest",
    "/rollouts": "Rollouts",
    "/machines": "Machines",
    "/group?name=default": "Group default",
    "/zone?name=default": "Zone default",
    "/machine?name=sensor": "Machine sensor",
    "/alerts": "Alerts",
    "/history": "History",
    "/sql": "SQL",
    "/resources": "Resources",
    "/resource?name=kept": "Resource kept",
    "/tokens": "API tokens",
    "/managers": "Managers",
    "/playground?address=load+%3E+0.5&type=alert&content=level%3D4&policy=alert": "Notification",
    "/contexts": "Contexts",
    "/contexts/details?key=kept%2Fone": "Context kept/one",
    "/events": "Events",
    "/queues": "Queues",
    "/queue?name=kept": "Queue kept",
    "/topology": "Topology",
    "/brokers": "Brokers",
    "/pipeline": "Pipeline",
    "/report-delay": "Report delay",
    "/activity": "Activity",
    "/logins": "Logins",
}


@pytest.fixture(scope="session")
def furnished(lab: Any) -> Any:
    """Something on every page: resources, contexts, queues, receivers' models; with script in every name."""
    with Api(lab, "olga") as olga:
        manifest = (
            "resources:\n"
            f"  - {{name: kept, type: memory, agent: local, labels: {{note: '{NASTY}'}}}}\n"
            "  - {name: kept-2, type: memory, agent: local}\n"
        )
        assert olga.post("/manifests", json={"manifest": manifest}).status_code == 200
        for key in ("kept/one", f"kept/{NASTY}"):
            reported = olga.put(
                f"/contexts/{key.replace('/', '%2F').replace('<', '%3C').replace('>', '%3E')}",
                json={"value": NASTY, "attributes": {"note": NASTY}},
            )
            assert reported.status_code == 200, reported.text
        lab.muster("message", "send", "queue:kept", NASTY, "-p", f"note={NASTY}")
        model = lab.place / "furnished.yaml"
        model.write_text(
            "models:\n"
            "  - {name: Server, of: receiver, attributes: {load: float, kind: string}}\n"
            "  - {name: alert, of: event, attributes: {level: int}}\n"
        )
        lab.muster("notify", "define", str(model))
        wait_until(lambda: olga.get("/resources/kept").json()["state"] == "up")
        wait_until(lambda: olga.get("/reports/nodes").json()["items"])
    return lab


async def serious(page: Any, options: dict[str, Any] | None = None) -> list[str]:
    """The violations of accessibility rules."""
    actual = (await Axe().run(page, options=options)).response["violations"]
    return [f"{row['id']}: {node['html'][:200]}" for row in actual for node in row["nodes"][:3]]


async def test_a_page_about_nothing_is_not_found(furnished, visit):
    here = await visit("olga")
    kinds = ("resource", "machine", "group", "zone", "queue")
    for path in (*(f"/{kind}?name=none" for kind in kinds), "/rollout?id=none", "/event?id=none"):
        response = await here.page.goto(f"{here.running.url}{path}")
        assert (path, response.status) == (path, 404)


CONTRAST = {"runOnly": {"type": "rule", "values": ["color-contrast"]}}  # what differs between colour schemes


@pytest.mark.timeout(600)  # 19 pages, each checked by axe
async def test_every_page_is_live_and_accessible_in_both_colour_schemes(furnished, visit):
    here = await visit("admin")
    problems = {}
    for path, title in PAGES.items():
        await here.open(path)
        assert await here.page.inner_text("h1") == title
        await here.live()
        painted = await here.page.evaluate(
            "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0"
        )
        assert painted < 5000, (path, painted)  # the second is measured on a quiet machine
        assert await here.page.evaluate("document.querySelectorAll('main script, main img').length") == 0
        for scheme, options in (("light", None), ("dark", CONTRAST)):
            await here.page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
            actual = await serious(here.page, options)
            if actual:
                problems[path, scheme] = actual
            await here.keep(f"{title.split()[0].lower()}-{re.sub('[^a-z]', '', path)[:8]}-{scheme}")
    assert problems == {}


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_pages_of_an_empty_domain_and_of_five_machines(tmp_path, visit):
    small = conftest.start(tmp_path / "home")
    conftest.stop(small)
    file = small.place / "muster.toml"
    file.write_text(file.read_text().replace("[sensor]\nenabled = true", "[sensor]\nenabled = false"))
    small = conftest.start(small.place)
    try:
        here = await visit("admin", running=small)
        general = [path for path in PAGES if "?" not in path]
        for path in general:
            await here.open(path)
            await here.live()
            assert await here.page.locator("main .problem").count() == 0, path
            assert await serious(here.page) == [], path
        await here.open("/map")
        assert "No machine has reported yet" in await here.page.inner_text("main")
        fleet = await child_process.start_muster(
            *("simulate", "sensors", "--machines", "5", "--groups", "2", "--period", "1s"),
            env={"MUSTER_HOME": str(small.place)},
        )
        async with fleet:
            # The open page becomes a map by itself.
            await here.until("document.querySelector('.fleet-map')?.dataset.drawn === '5'")
            for path in general:
                await here.open(path)
                await here.live()
                assert await serious(here.page) == [], path
            await here.keep("five-machines")
    finally:
        conftest.stop(small)


@pytest.mark.timeout(300)
async def test_on_a_phone_nothing_is_wider_than_the_screen(furnished, visit):
    here = await visit("vera", viewport={"width": 360, "height": 740}, is_mobile=True, has_touch=True)
    wide = []
    for path in PAGES:
        if path == "/logins":
            continue
        await here.open(path)
        await here.live()
        if await here.page.evaluate("document.documentElement.scrollWidth > innerWidth + 1"):
            wide.append(path)
        await here.keep(f"phone-{re.sub('[^a-z]', '', path)[:12] or 'overview'}")
    assert wide == []
    await here.page.click("#menu summary")
    await here.page.click("nav a[href='/brokers']")
    assert await here.page.inner_text("h1") == "Brokers"


PICTURES = Path(__file__).parent / "pictures"  # grey, a quarter of the size: REWRITE=1 takes them anew
PICTURED = {
    "alerts": "/alerts",
    "apply": "/apply",
    "playground": "/playground",
    "resources": "/resources?where=name+%3D+'kept'",
    "tokens": "/tokens",
}
SCREENS = {"laptop": (1366, 768), "phone": (390, 844)}
SCALE, DIFFERENCE_MAX = 4, 3.0  # of 255, on average: a line of text is less, another layout or palette more
VARYING = "time, #receivers, #models, #summary, .legend, td.num, .hint"


def difference(name: str, picture: bytes) -> float:
    """How much a picture differs from the one that is kept."""
    seen = Image.open(io.BytesIO(picture)).convert("L")
    seen = seen.resize((seen.width // SCALE, seen.height // SCALE), Image.Resampling.BOX)
    file = PICTURES / f"{name}.png"
    if os.environ.get("REWRITE"):
        PICTURES.mkdir(exist_ok=True)
        seen.quantize(16).save(file, optimize=True)
    return float(ImageStat.Stat(ImageChops.difference(Image.open(file).convert("L"), seen)).mean[0])


@pytest.mark.timeout(300)
async def test_pages_look_as_in_the_kept_pictures(furnished, visit):
    differences = {}
    for screen, (width, height) in SCREENS.items():
        here = await visit("olga", viewport={"width": width, "height": height})
        for scheme in ("light", "dark"):
            await here.page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
            for name, path in PICTURED.items():
                await here.open(path)
                await here.live()
                shot = await here.page.screenshot(mask=[here.page.locator(VARYING)], mask_color="#808080")
                differences[name, screen, scheme] = difference(f"{name}-{screen}-{scheme}", shot)
    assert {name: off for name, off in differences.items() if off > DIFFERENCE_MAX} == {}


async def test_a_predicate_is_completed_by_keyboard(furnished, visit):
    here = await visit("vera")
    await here.open("/resources")
    await here.page.focus("#f-where")
    await here.page.keyboard.type("gr")
    await here.page.wait_for_selector(".words >> text=group")
    await here.page.keyboard.press("ArrowDown")
    await here.page.keyboard.press("Enter")
    assert await here.page.input_value("#f-where") == "group"
    await here.page.keyboard.type(" = 'default' AND sta")
    await here.page.wait_for_selector(".words >> text=state")
    await here.page.keyboard.press("Escape")
    assert await here.page.locator(".words").count() == 0
    assert await here.page.input_value("#f-where") == "group = 'default' AND sta"


async def test_a_message_is_sent_read_and_moved(furnished, visit):
    here = await visit("olga")
    here.page.on("dialog", lambda dialog: dialog.accept())
    await here.open("/queues")
    await here.page.click("summary:text-is('Send a message')")
    await here.page.fill("#f-name", "letters")
    await here.page.fill("#f-text", NASTY)
    await here.page.fill("#f-properties", "amount=3")
    await here.page.click("button:text-is('Send')")
    assert "Sent to letters" in await here.page.inner_text(".notice")
    await here.open("/queue?name=letters")
    await here.page.click("#waiting tbody a")
    await here.page.wait_for_selector("#message pre")
    assert await here.page.inner_text("#message pre") == NASTY
    assert "amount" in await here.page.inner_text("#message")
    assert await serious(here.page) == []
    await here.page.fill("#f-to", "queue:archive")
    await here.page.click("button:text-is('Move')")
    assert "1 message" in await here.page.inner_text(".notice")
    await here.page.goto(f"{here.running.url}/queue?name=archive")
    await here.page.wait_for_selector("#waiting tbody tr")
    await here.page.fill("#f-selector", "amount >")
    await here.page.click("form[role=search]:has(#f-selector) button")
    await here.page.wait_for_selector("#waiting .problem")
    await here.page.click("summary:text-is('Move or purge')")
    await here.page.click("button:text-is('Purge')")
    assert "Failed" in await here.page.inner_text(".notice.bad[role=alert]")


async def test_times_are_those_of_the_reader(furnished, visit):
    shown = {}
    for zone in ("UTC", "Asia/Kolkata"):
        here = await visit("olga", timezone_id=zone)
        await here.open("/resource?name=kept")
        await here.live()
        time = here.page.locator("#facts time")
        await time.wait_for()
        shown[zone] = (await time.inner_text(), await time.get_attribute("title"))
    (utc, title), (local, title_there) = shown.values()
    minutes = [int(text[-8:-6]) * 60 + int(text[-5:-3]) for text in (utc, local)]
    assert ((minutes[1] - minutes[0]) % 1440, title) == (330, title_there)
    assert utc in title


OPENED = """window.opened = [];
window.EventSource = class extends EventSource {
    constructor(...given) { super(...given); opened.push(this); }
};"""
HIDE = """hidden => {
    Object.defineProperty(document, "hidden", {value: hidden, configurable: true});
    document.dispatchEvent(new Event("visibilitychange"));
}"""


async def test_a_page_that_nobody_sees_keeps_no_connection(furnished, visit):
    """A browser has six connections to a server: a seventh page would wait for ever."""
    here = await visit("olga")
    await here.page.add_init_script(OPENED)
    await here.open("/machines")
    await here.live()
    await here.page.evaluate(HIDE, True)
    assert await here.page.evaluate("opened.map(source => source.readyState)") == [2]
    await here.page.evaluate(HIDE, False)
    await here.until("opened.length === 2 && opened[1].readyState === 1")
    await here.live()


async def test_the_keyboard_reaches_everything_and_the_theme_is_kept(furnished, visit):
    here = await visit("olga")
    await here.open("/")
    await here.page.keyboard.press("Tab")
    assert await here.page.evaluate("document.activeElement.textContent") == "Skip to the content"
    await here.page.keyboard.press("Enter")
    assert await here.page.evaluate("document.activeElement.id") == "main"
    await here.page.focus("nav a[href='/queues']")
    await here.page.keyboard.press("Enter")
    await here.page.wait_for_url("**/queues")
    await here.page.focus("#theme")
    await here.page.keyboard.press("Enter")
    await here.page.keyboard.press("Enter")
    assert await here.page.evaluate("document.documentElement.dataset.theme") == "dark"
    await here.open("/brokers")
    assert await here.page.evaluate("document.documentElement.dataset.theme") == "dark"
    background = "getComputedStyle(document.body).backgroundColor"
    assert await here.page.evaluate(background) == "rgb(18, 22, 27)"


async def test_without_script_pages_are_read_and_forms_sent(furnished, visit):
    here = await visit("olga", java_script_enabled=False)
    await here.open("/contexts")
    assert "kept/one" in await here.page.inner_text("main")
    await here.page.click("summary:has-text('Write a context')")
    await here.page.fill("#f-key", "by-form")
    await here.page.fill("#f-value", "typed")
    await here.page.click("form[action='/do/put-context'] button")
    assert "Written: by-form" in await here.page.inner_text(".notice")


async def test_a_drag_over_a_chart_zooms_all_charts_and_the_arrows_read_values(furnished, visit):
    here = await visit("vera")
    await here.open("/machine?name=sensor&last=5m")
    await here.until("document.querySelectorAll('figure.plot .u-over').length >= 2")
    over = await here.page.locator("figure.plot .u-over").first.bounding_box()
    middle = over["y"] + over["height"] / 2
    await here.page.mouse.move(over["x"] + over["width"] * 0.5, middle)
    await here.page.mouse.down()
    await here.page.mouse.move(over["x"] + over["width"] * 0.9, middle, steps=4)
    await here.page.mouse.up()
    await here.until("location.search.includes('from=')")
    asked = "Object.fromEntries(new URLSearchParams(location.search))"
    chosen = await here.page.evaluate(asked)
    assert 60 < int(chosen["to"]) - int(chosen["from"]) < 180  # 40 % of five minutes
    assert await here.page.get_attribute("#range-live", "aria-pressed") == "false"
    await here.open("/report-delay")  # the next page has the same range
    await here.until("document.querySelectorAll('figure.plot .u-over').length >= 1")
    await here.page.select_option("#range-last", "5m")
    await here.until("document.querySelector('#range-live').getAttribute('aria-pressed') === 'true'")
    await here.until(
        "document.querySelector('figure.plot').getAttribute('aria-label').includes('Now median')"
    )
    await here.page.locator("figure.plot").first.focus()
    await here.page.keyboard.press("ArrowLeft")
    await here.until("document.querySelector('figure.plot .u-value').textContent.includes('UTC')")
    assert await serious(here.page) == []


async def test_the_map_shows_and_finds_every_machine(furnished, visit):
    here = await visit("vera")
    await here.open("/map")
    await here.until("document.querySelector('.fleet-map').dataset.drawn === '1'")
    assert "up 1" in await here.page.inner_text("#map-legend")
    await here.page.select_option("#map-metric", "cpu_percent")
    await here.until("document.querySelector('#map-legend').textContent.includes('100 %')")
    await here.page.hover(".fleet-map canvas", position={"x": 8, "y": 30})
    tip = await here.page.inner_text(".fleet-map .tip")
    assert "sensor" in tip, tip
    assert "default, default" in tip, tip
    await here.page.fill("#map-search", "nothing")
    assert "0 found" in await here.page.inner_text("#map-count")
    await here.page.fill("#map-search", "SENS")
    assert "1 found" in await here.page.inner_text("#map-count")
    await here.page.press("#map-search", "Enter")
    await here.page.wait_for_url("**/machine?name=sensor")


async def test_the_search_box_finds_anything_by_a_part_of_its_name(furnished, visit):
    here = await visit("olga")
    await here.open("/brokers")
    await here.page.keyboard.press("/")
    await here.page.keyboard.type("EPT")
    await here.page.keyboard.press("Backspace")
    await here.page.keyboard.type("t")
    await here.page.keyboard.press("Enter")
    await here.page.wait_for_url("**/find?q=EPt")
    await here.open("/find?q=ept")
    await here.page.wait_for_selector("#found >> text=kept/one")
    found = await here.page.inner_text("#found")
    assert all(heading in found for heading in ("Resources", "Contexts", "Queues")), found
    await here.page.click("#found >> a:text-is('kept-2')")
    assert await here.page.inner_text("h1") == "Resource kept-2"


async def test_a_manifest_is_planned_before_it_is_applied_and_resources_stop_and_start(furnished, visit):
    here = await visit("olga")
    here.page.on("dialog", lambda dialog: dialog.accept())
    await here.open("/apply")
    manifest = "resources:\n  - {name: planned, type: memory, agent: local}\n"
    await here.page.fill("#f-manifest", manifest)
    await here.page.click("text=Show the plan")
    assert "create" in await here.page.inner_text("#plan")
    assert "planned" in await here.page.inner_text("#plan")
    await here.page.click("text=Apply this plan")
    assert "Applied" in await here.page.inner_text(".notice")
    await here.open("/resource?name=planned")
    with Api(furnished, "olga") as olga:
        wait_until(lambda: olga.get("/resources/planned").json()["state"] == "up")
        await here.page.click("button:text-is('Stop')")
        assert "Stopping planned" in await here.page.inner_text(".notice")
        wait_until(lambda: olga.get("/resources/planned").json()["state"] == "down")
        await here.page.click("button:text-is('Start')")
        assert "Starting planned" in await here.page.inner_text(".notice")
        await here.page.click("summary:text-is('Live log')")
        await here.until("document.querySelector('.log pre').textContent.trim() !== ''")
        assert "undefined" not in await here.page.inner_text(".log pre")
        wait_until(lambda: olga.get("/resources/planned").json()["state"] == "up")
    assert await serious(here.page) == []


async def test_without_script_charts_are_tables(furnished, visit):
    here = await visit("vera", java_script_enabled=False)
    await here.page.goto(f"{here.running.url}/machine?name=sensor&last=5m")
    await here.page.wait_for_url("**tables=1**")
    assert "CPU" in await here.page.inner_text("main")
    assert await here.page.locator("#plot-machine tbody tr").count() > 5


async def test_a_viewer_sees_no_actions(furnished, visit):
    viewer = await visit("vera")
    for path in PAGES:
        if path == "/logins":
            continue
        await viewer.open(path)
        forms = "form[action^='/do/']" + (":not([action$='-token'])" if path == "/tokens" else "")  # its own
        assert await viewer.page.locator(forms).count() == 0, path
    answer = await viewer.page.goto(f"{furnished.url}/logins")
    assert answer.status == 403
    assert "The role admin is required" in await viewer.page.inner_text("main")


async def test_logging_in_and_out(furnished, visit):
    here = await visit(None)
    await here.page.goto(f"{furnished.url}/brokers")
    assert "/login" in here.page.url
    await here.page.fill("#f-name", "vera")
    await here.page.fill("#f-password", "wrong password")
    await here.page.click("button[type=submit]")
    assert "wrong name or password" in await here.page.inner_text("[role=alert]")
    assert await serious(here.page) == []
    await here.page.fill("#f-password", "the viewer's own")
    await here.page.click("button[type=submit]")
    await here.page.wait_for_url("**/brokers")
    kept = await here.page.context.cookies()
    assert {cooky["name"]: (cooky["httpOnly"], cooky["sameSite"]) for cooky in kept}["muster-session"] == (
        True,
        "Strict",
    )
    await here.page.click("text=Log out")
    await here.page.wait_for_url("**/login")
    await here.page.context.add_cookies(kept)  # the cookie of before is worth nothing now
    await here.page.goto(f"{furnished.url}/brokers")
    assert "/login" in here.page.url


async def test_script_in_names_and_values_is_text(furnished, visit):
    here = await visit("olga")
    for path in (
        "/contexts",
        "/contexts/details?key=kept%2Fone",
        "/queue?name=kept",
        "/resource?name=kept",
        "/queues",
    ):
        await here.open(path)
        await here.live()
        assert await here.page.evaluate("document.querySelectorAll('main script, main img').length") == 0
    await here.open("/queue?name=kept")
    assert NASTY in await here.page.inner_text("main")
    # In the question too, wherever it is shown again.
    await here.page.goto(f"{here.running.url}/machine?name=%3Cscript%3Ealert(1)%3C/script%3E")
    assert await here.page.evaluate("document.querySelectorAll('main script').length") == 0


async def test_the_playground_shows_receivers_and_reasons(furnished, visit):
    listening = await child_process.start_muster(
        "notify", "listen", "--model", "Server", "--state", "load=0.9", "--state", "kind=web",
        "--policy", "alert AND level >= 4", "--as", "s-1", env={"MUSTER_HOME": str(furnished.place)},
    )  # fmt: skip
    async with listening:
        await listening.line("listening as", timeout_s=60)
        here = await visit("olga")
        await here.open("/playground")
        await here.page.fill("#f-address", "load > 0.5")
        await here.page.fill("#f-type", "alert")
        await here.page.fill("#f-content", "level=4")
        await here.page.fill("#f-policy", "alert AND level >= 5")
        await here.page.fill("#f-receiver", "admin/s-1")
        await here.page.click("text=Evaluate")
        await here.page.wait_for_selector("#reached >> text=1 matching receiver")
        await here.page.wait_for_selector("#reached >> text=admin/s-1")
        await here.page.wait_for_selector("#judged >> text=does not accept this event")
        await here.page.wait_for_selector("#explained >> text=admin/s-1 receives the event")
        await here.keep("playground-answered")
        here.page.on("dialog", lambda dialog: dialog.accept())
        await here.page.click("text=Send this event")
        await here.page.wait_for_selector(".notice >> text=Sent: alert")
        await listening.line("alert level=4 from olga/web", timeout_s=30)
        await here.open("/events")
        await here.page.click("#events tbody tr:has-text('olga/web') a")
        await here.page.wait_for_selector("#trace >> text=admin/s-1")
        await here.page.wait_for_selector("#steps tbody >> text=matching receivers: 1")
        await here.page.wait_for_selector("#reached >> text=1 matching receiver")
        assert await serious(here.page) == []
        await here.page.click("#trace >> text=why")
        await here.page.fill("#f-content", "level=3")
        await here.page.click("text=Evaluate")
        await here.page.wait_for_selector("#reached >> text=0 matching receivers")
        await here.page.wait_for_selector("#near >> text=admin/s-1")
        await here.page.fill("#f-address", "load >")
        await here.page.click("text=Evaluate")
        await here.page.wait_for_selector("#reached .problem")
        assert await serious(here.page) == []


async def test_a_manager_is_killed_while_the_page_is_open(furnished, visit):
    here = await visit("admin")
    await here.open("/managers")
    await here.live()
    await here.until("document.querySelectorAll('#who tbody tr').length === 2")
    with Api(furnished, "admin") as admin:
        owner = admin.get("/resources/kept").json()["manager"]
    furnished.muster("chaos", "kill", owner)
    # The page is updated without a reload: the timeline shows the failover, and the state is good again.
    await here.page.wait_for_selector(
        f"#moved tbody tr:has-text('{owner}'):has-text('reassign')", timeout=60_000
    )
    await here.page.wait_for_selector("#moved svg rect.bad", state="attached")
    await here.keep("failover")
    with Api(furnished, "admin") as admin:
        wait_until(lambda: admin.get("/resources/kept").json()["state"] == "up")
    assert await serious(here.page) == []


async def test_names_are_offered_while_they_are_typed(furnished, visit):
    here = await visit("olga")
    await here.open("/brokers")
    await here.page.keyboard.press("/")
    await here.page.keyboard.type("ept-2")
    await here.page.wait_for_selector(".find .words >> text=kept-2")
    assert await serious(here.page) == []
    await here.page.keyboard.press("ArrowDown")
    await here.page.keyboard.press("Enter")
    await here.page.wait_for_url("**/resource?name=kept-2")
    await here.page.keyboard.press("/")
    await here.page.keyboard.type("ept")
    await here.page.wait_for_selector(".find .words li")
    await here.page.keyboard.press("Escape")
    assert await here.page.locator(".words").count() == 0


async def test_a_manifest_is_checked_while_it_is_written(furnished, visit):
    here = await visit("olga")
    await here.open("/apply?resource=kept-2")
    await here.page.wait_for_selector("#f-manifest")
    text = await here.page.input_value("#f-manifest")
    assert "name: kept-2" in text
    await here.page.fill("#f-manifest", text + "\n")
    await here.page.wait_for_selector(".editor [role=status]:text-is('Valid: keep 1.')")
    await here.page.fill("#f-manifest", text.replace("type: memory", "type: memory\n  colour: red"))
    await here.page.wait_for_selector(".editor .bad[role=status] >> text=colour")
    await here.page.fill("#f-manifest", text.replace("type: memory", "type: memory\n  labels: {tier: web}"))
    await here.page.wait_for_selector(".editor [role=status]:text-is('Valid: change 1.')")
    await here.page.click("text=Show the plan")
    assert "tier" in await here.page.inner_text("#plan tbody")
    assert await here.page.inner_text("#plan ins") == '"web"'
    assert await serious(here.page) == []


async def test_a_rollout_is_started_paused_and_ended(furnished, visit):
    with Api(furnished, "olga") as olga:
        entries = "".join(
            f"  - {{name: roll-{n}, type: memory, agent: local, group: rolled}}\n" for n in range(6)
        )
        assert olga.post("/manifests", json={"manifest": "resources:\n" + entries}).status_code == 200
        wait_until(lambda: all(olga.get(f"/resources/roll-{n}").json()["state"] == "up" for n in range(6)))
        here = await visit("olga")
        here.page.on("dialog", lambda dialog: dialog.accept())
        await here.open("/rollouts")
        await here.page.click("summary:text-is('Start a rollout')")
        await here.page.fill("#f-operation", "restart")
        await here.page.fill("#f-where", "group = 'rolled'")
        await here.page.fill("#f-batch", "2")
        await here.page.fill("#f-pause_s", "30s")
        await here.page.click("button:text-is('Start')")
        assert "Started the rollout" in await here.page.inner_text(".notice")
        await here.page.click("#rollouts h3 a >> nth=0")
        await here.page.wait_for_selector("#waves .cell.good")
        assert await here.page.locator("#waves .cell").count() == 6
        await here.page.click("button:text-is('Pause')")
        await here.page.wait_for_selector("#rollouts .badge.warn >> text=paused")
        assert await serious(here.page) == []
        await here.keep("rollout")
        await here.page.click("button:text-is('Abort')")
        await here.page.wait_for_selector("#rollouts .badge >> text=stopped")
        assert await here.page.locator("#steps tbody tr").count() == 6
        assert await here.page.locator("button:text-is('Pause')").count() == 0


async def test_a_machine_has_its_resources_and_is_drained_and_returned(furnished, visit):
    here = await visit("olga")
    here.page.on("dialog", lambda dialog: dialog.accept())
    await here.open("/machine?name=sensor")
    await here.page.wait_for_selector("#hosted a:text-is('kept-2')")
    with Api(furnished, "olga") as olga:
        await here.page.click("#hosted button:text-is('Drain this machine')")
        assert "Draining" in await here.page.inner_text(".notice")
        try:
            wait_until(lambda: olga.get("/agents").json()["items"][0]["cordoned"])
            await here.open("/managers")
            await here.page.click("#agents button:text-is('Return to service')")
        finally:
            olga.post("/agents/local/undrain")
        wait_until(lambda: not olga.get("/agents").json()["items"][0]["cordoned"])
        wait_until(lambda: olga.get("/resources/kept").json()["state"] == "up")


async def test_the_map_is_read_and_used_by_keyboard(furnished, visit):
    here = await visit("vera")
    await here.open("/map")
    await here.until("document.querySelector('.fleet-map').dataset.drawn === '1'")
    await here.page.focus(".fleet-map canvas")
    await here.page.keyboard.press("ArrowRight")
    assert "sensor" in await here.page.inner_text(".fleet-map .tip")
    await here.page.keyboard.press("Enter")
    await here.page.wait_for_url("**/machine?name=sensor")

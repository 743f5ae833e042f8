"""A whole domain with its web process, for every test here; and a real Chromium."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from muster.app import home, identities
from muster.app import settings as app_settings
from muster.app.components import web
from muster.app.supervisor import component_config, component_process
from muster.bus import api
from muster.core.settings import loader
from muster.core.telemetry import metrics
from muster.testing.eventually import eventually
from muster.trust.permissions import roles
from tests import debian
from tests.cli import driver

PASSWORDS = {"admin": "the admin's own", "olga": "the operator's own", "vera": "the viewer's own"}
ROLES = {"admin": "admin", "olga": "operator", "vera": "viewer"}
ARTEFACTS = Path(__file__).parents[1] / "artefacts" / "web"
CHROMIUM = Path("/usr/bin/chromium")
CHROMIUM_ARGUMENTS = (
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--disable-quic",
)
SETTINGS = """
[[inform.rules]]
keys = "secret/*"
read = ["role:operator"]
[manage]
enabled = true
beat_s = 1.0
registries = 1
[channel]
enabled = true
[sensor]
enabled = true
period_s = 1.0
http_port = 0
statsd_port = 0
[health]
port = 0
[web]
port = 0
"""


@dataclass
class Running:
    """A domain that runs in processes of its own, as a user would start it."""

    place: Path
    url: str

    @property
    def settings(self) -> app_settings.Settings:
        return loader.load(app_settings.Settings, file=self.place / "muster.toml")

    def muster(self, *arguments: str, stdin: str = "") -> Any:
        answer = driver.run(*arguments, "-o", "json", home=self.place, stdin=stdin)
        assert answer.code == 0, answer.err
        return answer.json() if answer.out.strip() else None

    async def connect(self, identity: str, role: roles.Role) -> api.Bus:
        config = component_config.ComponentConfig(component="web", settings=self.settings)
        folder = home.DomainFolder(self.settings.domain.folder)
        access = await asyncio.to_thread(component_process.access_of, config, folder, metrics.Metrics())
        return await access.connect_login(identity, role)

    def token(self, name: str) -> str:
        """A fresh one; making it costs what checking a password does."""
        arguments = {"name": name, "password": PASSWORDS[name]}
        response = httpx.post(f"{self.url}/api/v1/tokens", json=arguments, timeout=30)
        assert response.status_code == 201, response.text
        return str(response.json()["token"])


def start(place: Path, extra: str = "", *, port: int = 0) -> Running:
    """Make a home with the passwords above, and bring its domain up."""
    if not (place / "muster.toml").exists():
        made = driver.quick("init", "--name", "lab", "--port", "0", home=place)
        assert made.code == 0, made.err
        path = place / "muster.toml"
        path.write_text(path.read_text() + SETTINGS + extra)
        trust = identities.open_keyring(loader.load(app_settings.Settings, file=path))
        for name, password in PASSWORDS.items():
            web.set_password(trust, name, role=ROLES[name], password=password)
    up = driver.run(
        "up", "--detach", "--timeout", "120", "--set", f"web.port={port}", home=place, timeout_s=150
    )
    assert up.code == 0, up.err
    folder = home.DomainFolder(loader.load(app_settings.Settings, file=place / "muster.toml").domain.folder)
    running = folder.running()
    assert running is not None
    assert running.web_url is not None
    server = Running(place, running.web_url)
    wait_until(lambda: httpx.get(f"{server.url}/login", timeout=30).status_code == 200)
    return server


def stop(running: Running) -> None:
    driver.run("down", home=running.place, timeout_s=90)


def wait_until(condition: Callable[[], Any], *, timeout_s: float = 60.0) -> Any:
    return driver.wait_until(condition, timeout_s=timeout_s, not_yet=(httpx.HTTPError,))


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = start(tmp_path_factory.mktemp("lab") / "home")
    try:
        with Api(running, "admin") as admin:
            wait_until(lambda: len(admin.get("/managers").json().get("items", ())) == 2)
            wait_until(lambda: admin.get("/agents").json().get("items"))
        yield running
    finally:
        stop(running)


_tokens: dict[tuple[str, str], str] = {}


class Api(httpx.Client):
    """A REST client that is logged in."""

    def __init__(self, running: Running, name: str) -> None:
        if (running.url, name) not in _tokens:
            _tokens[running.url, name] = running.token(name)
        super().__init__(
            base_url=f"{running.url}/api/v1",
            headers={"Authorization": f"Bearer {_tokens[running.url, name]}"},
            timeout=60,
        )


@pytest.fixture
def admin(lab: Running) -> Iterator[Api]:
    with Api(lab, "admin") as client:
        yield client


@pytest.fixture
def olga(lab: Running) -> Iterator[Api]:
    with Api(lab, "olga") as client:
        yield client


@pytest.fixture
def vera(lab: Running) -> Iterator[Api]:
    with Api(lab, "vera") as client:
        yield client


@pytest.fixture(scope="session")
def chromium() -> Path:
    """Debian's Chromium."""
    debian.BROWSER.require()
    return CHROMIUM


@pytest_asyncio.fixture
async def browser(chromium: Path) -> AsyncIterator[Any]:
    from playwright import async_api

    async with async_api.async_playwright() as driver_:
        started = await driver_.chromium.launch(executable_path=str(chromium), args=list(CHROMIUM_ARGUMENTS))
        try:
            yield started
        finally:
            await started.close()


class Visit:
    """A browser window with a login; errors of its page fail the test."""

    def __init__(self, running: Running, page: Any) -> None:
        self.running = running
        self.page = page
        self.complaints: list[str] = []
        page.on("console", lambda message: self._said(message))
        page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))

    def _said(self, message: Any) -> None:
        # The browser itself reports an unreachable server and an ended login.
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            self.complaints.append(f"{message.type}: {message.text}")

    async def login(self, name: str) -> None:
        await self.page.goto(f"{self.running.url}/login")
        await self.page.fill("#f-name", name)
        await self.page.fill("#f-password", PASSWORDS[name])
        await self.page.click("button[type=submit]")
        await self.page.wait_for_selector("#live-state")

    async def open(self, path: str) -> None:
        answer = await self.page.goto(f"{self.running.url}{path}")
        assert answer.status == 200, (path, answer.status)

    async def live(self, *, timeout_s: float = 30.0) -> None:
        """Wait until the page receives changes and nothing on it is loading."""
        await self.until(
            "document.getElementById('live-state').textContent === 'live'"
            " && !document.body.innerText.includes('Loading…')",
            timeout_s=timeout_s,
        )

    async def until(self, expression: str, *, timeout_s: float = 60.0) -> None:
        """Until this is true in the page. (Playwright's own way evaluates text, which our pages forbid.)"""

        async def holds() -> bool:
            return bool(await self.page.evaluate(expression))

        await eventually(holds, timeout_s=timeout_s)

    async def keep(self, name: str) -> None:
        """A picture of the whole page, to be looked at: with MUSTER_PICTURES=1 in the environment."""
        if not os.environ.get("MUSTER_PICTURES"):
            return
        ARTEFACTS.mkdir(parents=True, exist_ok=True)
        await self.page.screenshot(path=str(ARTEFACTS / f"{name}.png"), full_page=True)


@pytest_asyncio.fixture
async def visit(browser: Any, lab: Running) -> AsyncIterator[Callable[..., Any]]:
    """Open windows: ``await visit("vera")``, with options of Playwright's contexts."""
    visits: list[Visit] = []

    async def begin(name: str | None, *, running: Running | None = None, **options: Any) -> Visit:
        options.setdefault("viewport", {"width": 1280, "height": 850})
        context = await browser.new_context(**options)
        made = Visit(running or lab, await context.new_page())
        visits.append(made)
        if name is not None:
            await made.login(name)
        return made

    yield begin
    assert [complaint for page_visit in visits for complaint in page_visit.complaints] == []

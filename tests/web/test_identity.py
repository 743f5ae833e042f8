"""Identity of people and programs: an OpenID provider, roles from groups, API tokens with scopes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urljoin, urlsplit

import httpx
import jwt
import msgspec
import pytest
import pytest_asyncio
from cryptography.hazmat.primitives.asymmetric import rsa

from muster.bus import api
from muster.core import errors
from muster.testing.plugin import require_part
from muster.trust import keyring
from muster.trust.permissions import roles
from muster.web import actions, guard, request_state, server, settings
from muster.web.auth import logins, oidc, scopes, sessions, tokens
from muster.web.data import read_model
from muster.web.rest import access

PROVIDER = "oidc-provider@9.13.3"
SECRET = "the secret of the client"
HERE = "http://127.0.0.1:8480"
GROUPS = {"operators": ("ops",), "viewers": ("staff",)}


class NoDomain:
    """A domain that is not running."""

    async def connect(self, identity: str, role: roles.Role) -> api.Bus:
        raise errors.NotConnected("the domain is not running")

    async def place(self) -> None:
        return None


def web_state(folder: Path, web_settings: settings.WebSettings) -> request_state.WebState:
    trust = keyring.Keyring.create(folder / "keys", "lab")
    source = read_model.ReadModel(NoDomain(), history="", domain="lab")
    return request_state.WebState(
        settings=web_settings,
        source=source,
        actions=actions.ActionRunner(source.feed),
        logins=logins.LoginService(trust.passwords(), folder / "web", web_settings),
        trust=trust,
    )


@contextlib.asynccontextmanager
async def serving(
    folder: Path, web_settings: settings.WebSettings
) -> AsyncIterator[tuple[request_state.WebState, httpx.AsyncClient]]:
    web = await asyncio.to_thread(web_state, folder, web_settings)
    await web.logins.open()
    transport = httpx.ASGITransport(app=server.build(web))
    async with httpx.AsyncClient(transport=transport, base_url=HERE, timeout=30) as client:
        yield web, client
    await web.actions.close()


# API tokens.


@pytest_asyncio.fixture
async def lab(tmp_path: Path) -> AsyncIterator[tuple[request_state.WebState, httpx.AsyncClient]]:
    async with serving(tmp_path, settings.WebSettings()) as (web, client):
        known = web.trust.passwords()
        for name, role, administers in (
            ("ann", roles.Role.OPERATOR, True),
            ("vic", roles.Role.VIEWER, False),
        ):
            await asyncio.to_thread(known.set, name, role, f"{name} has a secret", administers=administers)
        yield web, client


async def create(client: httpx.AsyncClient, name: str, **body: Any) -> dict[str, Any]:
    response = await client.post(
        "/api/v1/tokens", json={"name": name, "password": f"{name} has a secret", **body}
    )
    assert response.status_code == 201, response.text
    return dict(response.json())


async def get(
    client: httpx.AsyncClient, token: str, path: str = "/me", method: str = "GET"
) -> httpx.Response:
    return await client.request(method, f"/api/v1{path}", headers={"Authorization": f"Bearer {token}"})


async def test_a_token_has_at_most_the_role_of_its_owner(lab):
    web, client = lab
    made = await create(client, "ann", role="viewer", description="for grafana")
    assert (await get(client, made["token"])).json()["role"] == "viewer"
    response = await client.post(
        "/api/v1/tokens", json={"name": "vic", "password": "vic has a secret", "role": "operator"}
    )
    assert response.status_code == 403
    # The owner's role is lowered: so is that of the token, which keeps the password's time here.
    whole = await create(client, "ann")
    record = await asyncio.to_thread(web.trust.passwords().get, "ann")
    lowered = msgspec.structs.replace(record, role=roles.Role.VIEWER, administers=False)
    (web.trust.passwords()._folder / "ann.json").write_bytes(msgspec.json.encode(lowered))
    assert (await get(client, whole["token"])).json()["role"] == "viewer"


async def test_scopes_limit_a_token_to_parts_of_the_api(lab):
    _, client = lab
    made = await create(client, "ann", scopes=["contexts:read", "access"])
    token = made["token"]
    assert (await get(client, token)).json()["scopes"] == ["access", "contexts:read"]
    assert (await get(client, token, "/logins")).status_code == 200
    assert (await get(client, token, "/contexts")).status_code == 503  # permitted; the domain is down
    assert (await get(client, token, "/contexts/x", "DELETE")).status_code == 403
    refused = await get(client, token, "/alerts")
    assert (refused.status_code, refused.json()["hint"]) == (403, "create a token with the scope alerts")
    unknown = await client.post(
        "/api/v1/tokens", json={"name": "ann", "password": "ann has a secret", "scopes": ["alert"]}
    )
    assert unknown.status_code == 400
    assert "alerts" in unknown.json()["hint"]


def test_scopes_are_the_tags_of_the_openapi_document():
    paths = server.rest_application().openapi()["paths"]
    tags = {tag for path in paths.values() for operation in path.values() for tag in operation["tags"]}
    assert tags == set(scopes.AREAS)


async def test_owners_list_and_revoke_their_tokens_and_admins_those_of_all(lab):
    _, client = lab
    of_ann, of_vic = await create(client, "ann"), await create(client, "vic")
    listed = (await get(client, of_vic["token"], "/tokens")).json()["items"]
    assert [row["id"] for row in listed] == [of_vic["id"]]
    assert "digest" not in listed[0]
    assert (await get(client, of_ann["token"], "/tokens")).json()["total"] == 2
    assert (await get(client, of_vic["token"], f"/tokens/{of_ann['id']}", "DELETE")).status_code == 404
    assert (await get(client, of_ann["token"])).status_code == 200
    assert (await get(client, of_ann["token"], f"/tokens/{of_vic['id']}", "DELETE")).status_code == 204
    assert (await get(client, of_vic["token"])).status_code == 401


async def test_a_token_that_may_only_read_revokes_no_token_but_itself(lab):
    _, client = lab
    other, reader = await create(client, "vic"), await create(client, "vic", scopes=["access:read"])
    refused = await get(client, reader["token"], f"/tokens/{other['id']}", "DELETE")
    assert (refused.status_code, refused.json()["hint"]) == (403, "create a token with the scope access")
    assert (await get(client, other["token"])).status_code == 200
    assert (await get(client, reader["token"], "/tokens/current", "DELETE")).status_code == 204
    assert (await get(client, reader["token"])).status_code == 401


async def test_a_token_revokes_none_with_a_higher_role_than_its_own(lab):
    _, client = lab
    higher, lower = await create(client, "ann"), await create(client, "ann", role="viewer")
    refused = await get(client, lower["token"], f"/tokens/{higher['id']}", "DELETE")
    assert (refused.status_code, refused.json()["hint"]) == (
        403,
        "use a token with the role admin, or log in",
    )
    assert (await get(client, higher["token"])).status_code == 200
    assert (await get(client, higher["token"], f"/tokens/{lower['id']}", "DELETE")).status_code == 204


async def test_no_cache_stores_what_a_person_may_see(lab):
    _, client = lab
    made = await create(client, "ann")
    for response in (
        await get(client, made["token"]),
        await client.get("/login"),
        await client.get("/nothing"),
    ):
        assert response.headers["cache-control"] == "no-store", response.request.url
    assert (await client.get("/static/muster.css")).headers["cache-control"] == "max-age=300"


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("POST", "/login", {"Origin": "http://["}, 403),
        ("GET", "/login?next=//[", {}, 200),
        ("GET", "/login", {"Host": "[::1"}, 400),
    ],
)
async def test_an_address_with_an_open_bracket_is_refused_and_not_a_bug(lab, method, path, headers, status):
    _, client = lab
    assert (await client.request(method, path, headers=headers)).status_code == status


@pytest.mark.parametrize(("scheme", "secure"), [("http", False), ("https", True)])
async def test_a_cookie_is_not_sent_without_tls_where_a_proxy_serves_it(lab, scheme, secure):
    web, client = lab
    form = {"name": "ann", "password": "ann has a secret"}
    origin = f"{scheme}://{urlsplit(HERE).netloc}"
    response = await client.post("/login", data=form, headers={"Origin": origin})
    assert response.status_code == 303
    assert ("secure" in response.headers["set-cookie"].lower()) is secure
    session = await web.logins.recognise_cookie(response.cookies[request_state.COOKIE])
    cookie = {"Cookie": f"{request_state.COOKIE}={response.cookies[request_state.COOKIE]}", "Origin": origin}
    form = {"form": web.logins.form_token(session), "back": "/tokens", "description": "mine"}
    noted = await client.post("/do/create-token", data=form, headers=cookie)
    assert noted.headers["set-cookie"].startswith("muster-note=")
    assert ("secure" in noted.headers["set-cookie"].lower()) is secure


async def test_a_long_body_is_read_only_after_a_login(lab):
    _, client = lab
    made = await create(client, "ann")
    body = json.dumps({"value": "x" * (4 * guard.ANONYMOUS_BODY_MAX)}).encode()
    read = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal read
        for read in range(1000, len(body) + 1000, 1000):
            yield body[read - 1000 : read]

    async def put(content: Any, token: str) -> tuple[int, str]:
        headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {token}"} if token else {}
        )
        response = await client.put("/api/v1/contexts/x", content=content, headers=headers)
        return response.status_code, response.json()["code"]

    for token in ("", "muster_guess"):
        assert await put(body, token) == (401, "unauthorized")
        assert await put(chunks(), token) == (401, "unauthorized")
        assert read <= guard.ANONYMOUS_BODY_MAX + 1000
    assert (await put(body, made["token"]))[0] == 503  # permitted; the domain is down
    assert (await put(chunks(), made["token"]))[0] == 503
    assert read >= len(body)
    short = await client.post("/api/v1/tokens", content=b" " * guard.ANONYMOUS_BODY_MAX)
    assert short.status_code == 400  # read, and not JSON


@pytest.mark.virtual_time
async def test_a_body_that_does_not_arrive_is_not_awaited_for_ever():
    async def known() -> bool:
        return True

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0.6 * guard.BODY_S)
        return {"type": "http.request", "body": b"x", "more_body": True}

    body = guard.RequestBody(receive, known)
    await body.read()
    with pytest.raises(errors.InvalidInput, match="did not arrive"):
        await body.read()
    assert isinstance(body.refusal, errors.InvalidInput)


async def test_a_revoked_an_expired_and_a_forged_token_are_refused(lab):
    web, client = lab
    made = await create(client, "vic")
    other = "A" if made["token"][-1] != "A" else "B"
    assert (await get(client, made["token"][:-1] + other)).status_code == 401
    assert (await get(client, made["token"].replace(made["id"], "0" * 16))).status_code == 401
    await asyncio.to_thread(web.logins.tokens.revoke, made["id"])
    assert (await get(client, made["token"])).status_code == 401
    again = await create(client, "vic", lifetime_s=60)
    web.logins.tokens._clock = lambda: time.time() + 61
    assert (await get(client, again["token"])).status_code == 401
    assert await asyncio.to_thread(web.logins.tokens.list) == []


async def test_a_new_password_and_a_removal_end_tokens_at_once(lab):
    web, client = lab
    known = web.trust.passwords()
    made = await create(client, "vic")
    assert (await get(client, made["token"])).status_code == 200
    await asyncio.to_thread(known.set, "vic", roles.Role.VIEWER, "vic has a secret")
    assert (await get(client, made["token"])).status_code == 401
    again = await create(client, "vic")
    assert (await get(client, again["token"])).status_code == 200
    await asyncio.to_thread(known.remove, "vic")
    assert (await get(client, again["token"])).status_code == 401


async def test_sessions_and_tokens_have_what_their_identity_still_permits(lab):
    web, client = lab
    made = await create(client, "ann")
    assert (await get(client, made["token"])).json()["role"] == "admin"
    await asyncio.to_thread(web.trust.revoke, "ann")
    response = await get(client, made["token"])
    assert (response.status_code, "revoked" in response.text) == (401, True)
    with pytest.raises(errors.Unauthorized, match="revoked"):
        await web.logins.check_password("ann", "ann has a secret", "10.0.0.1")
    await asyncio.to_thread(web.trust.issue, "ann", roles.Role.VIEWER)  # narrower than the login
    assert (await get(client, made["token"])).json()["role"] == "viewer"


async def test_a_login_that_cannot_be_read_now_is_not_taken_for_a_removed_one(lab, monkeypatch):
    web, client = lab
    made = await create(client, "vic")

    def exhausted(name: str) -> None:
        raise errors.Refused(f"{name}: too many open files")

    monkeypatch.setattr(web.logins._known, "get", exhausted)
    assert (await get(client, made["token"])).status_code == 409
    monkeypatch.undo()
    assert (await get(client, made["token"])).status_code == 200


async def test_a_token_cannot_create_tokens_nor_last_longer_than_the_setting(lab):
    _, client = lab
    made = await create(client, "ann")
    headers = {"Authorization": f"Bearer {made['token']}"}
    assert (await client.post("/api/v1/tokens", json={}, headers=headers)).status_code == 403
    body = {"name": "ann", "password": "ann has a secret", "lifetime_s": 366 * 86400}
    response = await client.post("/api/v1/tokens", json=body)
    assert (response.status_code, "web.token_s" in response.json()["hint"]) == (400, True)


def test_tokens_of_an_owner_are_bounded_and_the_secret_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tokens, "OF_OWNER_MAX", 2)
    store = tokens.TokenStore(tmp_path / "tokens")
    owner = sessions.LoginSession(
        id="", name="ann", role=sessions.WebRole.VIEWER, kind=sessions.TokenKind.COOKIE, born=1, until=2
    )
    made = [store.create(owner, scopes=(), description="", lifetime_s=60) for _ in range(2)]
    with pytest.raises(errors.LimitExceeded, match="2 tokens"):
        store.create(owner, scopes=(), description="", lifetime_s=60)
    for text, record in made:
        path = tmp_path / "tokens" / f"{record.id}.json"
        assert text.rpartition("_")[2].encode() not in path.read_bytes()
        assert path.stat().st_mode & 0o077 == 0
    # A damaged file ends its own token only.
    for damaged in (b"{", b'{"id":"\xff"}', b"[" * 100_000):
        (tmp_path / "tokens" / f"{made[0][1].id}.json").write_bytes(damaged)
        with pytest.raises(errors.Unauthorized):
            store.verify(made[0][0])
        assert store.verify(made[1][0]).owner == "ann"
        assert made[1][1].id in [record.id for record in store.list()]


def test_a_token_stays_when_the_clock_goes_forth_and_back(tmp_path: Path):
    ahead_s = 0.0
    store = tokens.TokenStore(tmp_path / "tokens", clock=lambda: time.time() + ahead_s)
    owner = sessions.LoginSession(
        id="", name="ann", role=sessions.WebRole.VIEWER, kind=sessions.TokenKind.COOKIE, born=1, until=2
    )
    text, record = store.create(owner, scopes=(), description="", lifetime_s=600)
    ahead_s = 3600.0
    assert store.list() == []
    ahead_s = 0.0
    assert store.list() == [store.verify(text)] == [record]
    ahead_s = 2.0 * tokens.CLOCK_STEP_S
    assert store.list() == []
    assert not list((tmp_path / "tokens").glob("*.json"))


@pytest.mark.parametrize("act", ["create", "revoke"])
async def test_what_is_done_with_a_token_is_recorded_although_its_request_ends(
    lab, monkeypatch: pytest.MonkeyPatch, act: str
):
    state, client = lab
    made = await create(client, "ann")
    recorded: list[str] = []
    begun, go_on = threading.Event(), threading.Event()
    work = getattr(tokens.TokenStore, act)

    def slow(*arguments: Any, **options: Any) -> Any:
        begun.set()
        assert go_on.wait(30)
        return work(*arguments, **options)

    async def record(who: str, what: str, *_: Any, **__: Any) -> None:
        recorded.append(what)

    monkeypatch.setattr(tokens.TokenStore, act, slow)
    monkeypatch.setattr(state.actions, "record", record)
    owner = msgspec.structs.replace(
        await state.logins.recognise_token(made["token"]), kind=sessions.TokenKind.COOKIE
    )
    request = asyncio.create_task(
        access.issue_token(state, owner, access.TokenBody.model_validate({}))
        if act == "create"
        else access.revoke_token(request_state.RestCall(state, owner), made["id"])
    )
    assert await asyncio.to_thread(begun.wait, 30)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    go_on.set()
    await state.actions.close()
    assert recorded == [f"{act}-token"]


# The identity provider.


def provider_folder() -> Path | None:
    """The folder with npm's package, kept from run to run; None if it cannot be installed."""
    folder = Path.home() / ".cache" / "muster" / PROVIDER.replace("@", "-")
    installed = folder / "node_modules" / "oidc-provider" / "package.json"
    if not installed.exists() and shutil.which("npm") and shutil.which("node"):
        folder.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", PROVIDER]
        subprocess.run(command, cwd=folder, capture_output=True, timeout=110, check=False)
    return folder if installed.exists() else None


@contextlib.asynccontextmanager
async def real_provider(callback: str) -> AsyncIterator[str]:
    folder = await asyncio.to_thread(provider_folder)
    require_part(PROVIDER, folder, hint="needs node, npm and a network the first time")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        "node", str(Path(__file__).with_name("oidc_provider.mjs")), str(port), callback, SECRET,
        cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            while b"ready" not in await process.stdout.readline():
                assert process.returncode is None
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        await process.communicate()


def oidc_settings(issuer: str, tmp_path: Path, **more: Any) -> settings.WebSettings:
    secret = tmp_path / "client-secret"
    secret.write_text(SECRET)
    given = {"client_id": "muster", "client_secret": f"file:{secret}", **GROUPS, **more}
    return settings.WebSettings(oidc=settings.OidcSettings(issuer=issuer, **given))


async def log_in(browser: httpx.AsyncClient, address: str, person: str) -> str:
    """Fill in the provider's pages as a person does; the address to which they lead back."""
    response = await browser.get(address)
    for _ in range(10):
        if response.is_redirect:
            target = urljoin(str(response.url), response.headers["location"])
            if target.startswith(HERE):
                return target
            response = await browser.get(target)
            continue
        action = re.search(r'<form[^>]*action="([^"]+)"', response.text)
        prompt = re.search(r'name="prompt" value="(\w+)"', response.text)
        assert action is not None, response.text
        assert prompt is not None, response.text
        fields = {"prompt": prompt[1], "login": person, "password": "any"}
        response = await browser.post(urljoin(str(response.url), action[1]), data=fields)
    raise AssertionError(response.text)


async def begin(client: httpx.AsyncClient, next_: str = "/") -> str:
    response = await client.get("/login/oidc", params={"next": next_})
    assert response.status_code == 303, response.text
    return str(response.headers["location"])


async def test_people_log_in_with_a_provider_and_their_groups_decide_the_role(tmp_path: Path):
    async with (
        real_provider(f"{HERE}/login/oidc/callback") as issuer,
        serving(tmp_path, oidc_settings(issuer, tmp_path)) as (web, client),
        httpx.AsyncClient(timeout=30) as browser,
    ):
        assert "single sign-on" in (await client.get("/login")).text
        back = await log_in(browser, await begin(client, "/alerts"), "ann")
        arrived = await client.get(back)
        assert (arrived.status_code, "0;url=/alerts" in arrived.text) == (200, True)
        assert "samesite=strict" in arrived.headers["set-cookie"].lower()
        me = (await client.get("/api/v1/me")).json()
        assert (me["name"], me["role"]) == ("oidc-ann_40_example_2e_com", "operator")
        # The code and the state can be used once.
        assert (await client.get(back)).status_code == 401

        # Another user, in another browser: another role, or none.
        for person, status in (("vic", 200), ("mallory", 403)):
            async with (
                httpx.AsyncClient(transport=client._transport, base_url=HERE) as another,
                httpx.AsyncClient(timeout=30) as their_browser,
            ):
                response = await another.get(await log_in(their_browser, await begin(another), person))
                assert response.status_code == status
                if status == 200:
                    assert (await another.get("/api/v1/me")).json()["role"] == "viewer"

        # A person of the provider creates tokens too, and the settings decide about them as well.
        session = await web.logins.recognise_cookie(client.cookies[request_state.COOKIE])
        text, _ = await web.logins.create_token(session, role=sessions.WebRole.VIEWER)
        assert (await get(client, text)).json()["role"] == "viewer"
    async with serving(tmp_path / "other", settings.WebSettings()) as (_, without):
        assert "single sign-on" not in (await without.get("/login")).text
        assert (await without.get("/login/oidc")).status_code == 404
    changed = oidc_settings(issuer, tmp_path, operators=("others",))
    service = logins.LoginService(web.trust.passwords(), tmp_path / "web", changed)
    await service.open()
    with pytest.raises(errors.Unauthorized, match="no role"):
        await service.recognise_token(text)


async def test_a_login_that_another_browser_began_is_refused(tmp_path: Path):
    async with (
        real_provider(f"{HERE}/login/oidc/callback") as issuer,
        serving(tmp_path, oidc_settings(issuer, tmp_path)) as (_, client),
        httpx.AsyncClient(timeout=30) as browser,
    ):
        back = await log_in(browser, await begin(client), "ann")
        async with httpx.AsyncClient(transport=client._transport, base_url=HERE) as victim:
            assert (await victim.get(back)).status_code == 401  # without an attempt of its own
            await begin(victim)
            assert (await victim.get(back)).status_code == 401  # with another state
        refused = await client.get("/login/oidc/callback", params={"error": "access_denied"})
        assert (refused.status_code, "access_denied" in refused.text) == (401, True)
        assert request_state.COOKIE not in client.cookies


async def test_a_provider_that_does_not_answer_is_shown_on_the_login_page(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    async with serving(tmp_path, oidc_settings(f"http://127.0.0.1:{port}", tmp_path)) as (_, client):
        response = await client.get("/login/oidc")
        assert (response.status_code, "does not respond" in response.text) == (503, True)


async def test_codes_that_the_provider_refuses_are_throttled_by_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with serving(tmp_path, oidc_settings(ISSUER, tmp_path)) as (web, _):
        requests: list[str] = []

        async def finish(_: oidc.OidcAttempt, *, state: str, code: str) -> oidc.Claims:
            requests.append(code)
            raise errors.Unauthorized("the identity provider refused the login")

        assert web.logins.provider is not None
        monkeypatch.setattr(web.logins.provider, "finish", finish)
        attempt = oidc.OidcAttempt(
            state="s", nonce="n", verifier="v", next="/", redirect=HERE, until=int(time.time() + 600)
        )
        text = oidc.seal_attempt(attempt, web.logins._key)

        async def guess(address: str) -> type[errors.MusterError]:
            with pytest.raises(errors.MusterError) as caught:
                await web.logins.finish_oidc(text, state="s", code="guess", address=address)
            return caught.type

        most = logins.REFUSED_CODES.at_once
        kinds = [await guess("192.0.2.1") for _ in range(most + 5)]
        assert kinds[:most] == [errors.Unauthorized] * most
        assert kinds[-1] is errors.Overloaded
        assert len(requests) < len(kinds)
        assert await guess("192.0.2.2") is errors.Unauthorized


KEY, STRANGE_KEY = (rsa.generate_private_key(65537, 2048) for _ in range(2))
ISSUER = "https://idp.example.com"


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"iss": "https://other.example.com"}, KEY),
        ({"aud": "another-application"}, KEY),
        ({"exp": 1}, KEY),
        ({"nonce": "of another login"}, KEY),
        ({"azp": "another-application"}, KEY),
        ({"sub": None}, KEY),
        ({}, STRANGE_KEY),
        ({}, None),
    ],
    ids=["issuer", "audience", "expired", "nonce", "party", "no subject", "forged", "unsigned"],
)
async def test_an_id_token_that_is_not_for_this_login_is_refused(changed: dict[str, Any], key: Any):
    provider = oidc.OidcProvider(settings.OidcSettings(issuer=ISSUER, client_id="muster", viewers=("*",)))
    provider._keys_read_s = time.monotonic()
    provider._keys = {
        "k": jwt.PyJWK.from_dict(
            jwt.algorithms.RSAAlgorithm.to_jwk(KEY.public_key(), as_dict=True) | {"kid": "k", "alg": "RS256"}
        )
    }
    claims = {
        "iss": ISSUER,
        "aud": "muster",
        "sub": "1",
        "iat": time.time(),
        "exp": time.time() + 60,
        "nonce": "n",
    }
    assert await provider._verify(jwt.encode(claims, KEY, "RS256", headers={"kid": "k"}), "n")
    claims = {name: value for name, value in (claims | changed).items() if value is not None}
    token = jwt.encode(claims, key or "", "RS256" if key else "none", headers={"kid": "k"})
    with pytest.raises(errors.Unauthorized):
        await provider._verify(token, "n")


async def test_a_key_that_the_provider_withdrew_is_not_accepted_for_long(monkeypatch: pytest.MonkeyPatch):
    provider = oidc.OidcProvider(settings.OidcSettings(issuer=ISSUER, client_id="muster", viewers=("*",)))
    metadata = oidc.ProviderMetadata(ISSUER, f"{ISSUER}/auth", f"{ISSUER}/token", f"{ISSUER}/keys")

    def document(key: rsa.RSAPrivateKey, id: str) -> dict[str, Any]:
        public = jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key(), as_dict=True)
        return {"keys": [public | {"kid": id, "alg": "RS256"}]}

    published = document(KEY, "k")

    async def read(*_: Any) -> Any:
        return metadata

    async def get(*_: Any) -> Any:
        return published

    monkeypatch.setattr(provider, "_read_metadata", read)
    monkeypatch.setattr(provider, "_get", get)
    assert await provider._key("k")
    published = document(STRANGE_KEY, "l")
    assert await provider._key("k")  # the keys are read once an hour
    provider._keys_read_s -= oidc.METADATA_S
    with pytest.raises(errors.Unauthorized, match="unknown key"):
        await provider._key("k")
    assert await provider._key("l")


def test_the_highest_role_of_the_groups_counts():
    given = settings.OidcSettings(
        issuer=ISSUER, client_id="muster", viewers=("*",), operators=("ops",), admins=("root", "ops-lead")
    )
    assert oidc.role_of_groups((), given) == (sessions.WebRole.VIEWER, ("*",))
    assert oidc.role_of_groups(("ops", "x"), given) == (sessions.WebRole.OPERATOR, ("*", "ops"))
    assert oidc.role_of_groups(("ops", "root"), given) == (sessions.WebRole.ADMIN, ("*", "ops", "root"))
    narrow = msgspec.structs.replace(given, viewers=())
    assert oidc.role_of_groups(("strangers",), narrow) is None


def test_names_of_the_provider_are_different_for_different_people():
    people = ["ann@example.com", "ann_40_example_2e_com", "ann-example-com", "Änne", "ann", "a.nn", "a_nn"]
    names = [oidc.identity_name(person, "oidc-") for person in people]
    assert len(set(names)) == len(people)
    with pytest.raises(errors.Forbidden, match="too long"):
        oidc.identity_name("a" * 200, "oidc-")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"issuer": "http://idp.example.com", "client_id": "m", "viewers": ("*",)}, "https"),
        ({"issuer": ISSUER, "viewers": ("*",)}, "client_id"),
        ({"issuer": ISSUER, "client_id": "m"}, "no group"),
        ({"issuer": ISSUER, "client_id": "m", "admins": ("*",)}, "viewers only"),
    ],
)
def test_settings_that_would_allow_unauthenticated_access_are_refused(given: dict[str, Any], reason: str):
    with pytest.raises(errors.InvalidInput, match=reason):
        settings.OidcSettings(**given)


def test_the_address_of_a_login_names_pkce_and_the_callback():
    query = parse_qs(urlsplit(asyncio.run(_address())).query)
    assert query["code_challenge_method"] == ["S256"]
    assert query["redirect_uri"] == [f"{HERE}/login/oidc/callback"]
    assert query["scope"] == ["openid profile"]


async def _address() -> str:
    provider = oidc.OidcProvider(settings.OidcSettings(issuer=ISSUER, client_id="muster", viewers=("*",)))
    metadata = oidc.ProviderMetadata(ISSUER, f"{ISSUER}/auth", f"{ISSUER}/token", f"{ISSUER}/keys")
    provider._metadata = (time.monotonic(), metadata)
    address, _ = await provider.begin(f"{HERE}/login/oidc/callback", "/")
    return address

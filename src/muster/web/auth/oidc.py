"""Login with an OpenID Connect provider: authorization code flow with PKCE.

The browser keeps the state of a login that has begun, in a signed cookie (`OidcAttempt`): nothing is stored
for logins that are never finished.  The provider's configuration and keys are read when they are first
needed, and again after an hour or for a key that is not known.

The ID token proves who the person is: its signature, issuer, audience, expiry and nonce are checked.  Groups
are read from the ID token, or from the provider's userinfo endpoint if the token has none, and decide the
role (`role_of_groups`).
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import os
import re
import secrets
import ssl
import time
import urllib.parse
from collections.abc import Sequence
from typing import Any

import jwt
import msgspec

from muster.bus.http import client
from muster.core import errors, subjects
from muster.core.settings import loader
from muster.core.telemetry import log
from muster.web import settings as settings_
from muster.web.auth import sessions, signed_text

ATTEMPT_S = 600
METADATA_S = 3600.0
KEYS_AGAIN_S = 30.0  # between two requests for keys because of an unknown key id
EXCHANGES_MAX = 16
BODY_MAX = 1 << 20
LEEWAY_S = 60
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
ANY_GROUP = "*"
events = log.EventLog("web")


class OidcAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """A login that has begun, as the browser keeps it."""

    state: str
    nonce: str
    verifier: str  # of PKCE
    next: str
    redirect: str
    until: int


class ProviderMetadata(msgspec.Struct, frozen=True):
    issuer: str
    authorization_endpoint: str
    token_endpoint: str
    jwks_uri: str
    userinfo_endpoint: str = ""
    token_endpoint_auth_methods_supported: tuple[str, ...] = ("client_secret_basic",)


class TokenResponse(msgspec.Struct, frozen=True):
    id_token: str
    access_token: str = ""


class Claims(msgspec.Struct, frozen=True, kw_only=True):
    """A person that the provider has authenticated."""

    name: str
    groups: tuple[str, ...]


def role_of_groups(
    groups: Sequence[str], settings: settings_.OidcSettings
) -> tuple[sessions.WebRole, tuple[str, ...]] | None:
    """The highest role of the groups and the groups that have one; None if no group has a role."""
    roles = {
        sessions.WebRole.ADMIN: settings.admins,
        sessions.WebRole.OPERATOR: settings.operators,
        sessions.WebRole.VIEWER: settings.viewers,
    }
    known = {group for of_role in roles.values() for group in of_role}
    relevant = tuple(sorted(known.intersection((*groups, ANY_GROUP))))
    for role, of_role in roles.items():
        if not set(of_role).isdisjoint(relevant):
            return role, relevant
    return None


def identity_name(claim: str, prefix: str) -> str:
    """The name of a person on the bus: ``oidc-ann_40_example_2e_com`` for ``ann@example.com``.

    Characters that a name cannot have are replaced by their code points in hexadecimal, and so is ``_``:
    different claims have different names.
    """
    name = prefix + re.sub(r"[^A-Za-z0-9-]", lambda match: f"_{ord(match[0]):x}_", claim)
    try:
        return subjects.token(name)
    except errors.InvalidInput:
        raise errors.Forbidden(f"the name {claim[:100]!r} of the identity provider is too long") from None


def seal_attempt(attempt: OidcAttempt, key: bytes) -> str:
    return signed_text.seal(attempt, key, "oidc")


def unseal_attempt(text: str, key: bytes, *, now_s: float) -> OidcAttempt:
    attempt = signed_text.unseal(text, key, "oidc", OidcAttempt)
    if attempt is None:
        raise errors.Unauthorized("this login was not begun in this browser", hint="log in again")
    if attempt.until <= now_s:
        raise errors.Unauthorized("the login took too long", hint="log in again")
    return attempt


class OidcProvider:
    """The provider of the settings. Its endpoints are used over https, or over http on loopback."""

    def __init__(self, settings: settings_.OidcSettings) -> None:
        self._settings = settings
        self._metadata: tuple[float, ProviderMetadata] | None = None
        self._keys: dict[str, jwt.PyJWK] = {}
        self._keys_read_s = -METADATA_S
        self._reading = asyncio.Lock()
        self._exchanges = 0

    async def begin(self, redirect: str, next_: str) -> tuple[str, OidcAttempt]:
        """The address to which the browser is sent, and the state to keep in it."""
        metadata = await self._read_metadata()
        attempt = OidcAttempt(
            state=secrets.token_urlsafe(24),
            nonce=secrets.token_urlsafe(24),
            verifier=secrets.token_urlsafe(48),
            next=next_,
            redirect=redirect,
            until=int(time.time() + ATTEMPT_S),
        )
        challenge = signed_text.encode(hashlib.sha256(attempt.verifier.encode()).digest())
        query = urllib.parse.urlencode(
            {
                "response_type": "code",
                "client_id": self._settings.client_id,
                "redirect_uri": redirect,
                "scope": " ".join(("openid", *self._settings.scopes)),
                "state": attempt.state,
                "nonce": attempt.nonce,
                "code_challenge": challenge,
                "code_challenge_method": "S256",
            }
        )
        joint = "&" if "?" in metadata.authorization_endpoint else "?"
        return f"{metadata.authorization_endpoint}{joint}{query}", attempt

    async def finish(self, attempt: OidcAttempt, *, state: str, code: str) -> Claims:
        """The person whom the provider has authenticated."""
        if not hmac.compare_digest(state.encode(), attempt.state.encode()):
            raise errors.Unauthorized("this login was not begun in this browser", hint="log in again")
        if self._exchanges >= EXCHANGES_MAX:
            raise errors.Overloaded("too many logins are pending", retry_after_s=2.0)
        self._exchanges += 1
        try:
            return await self._exchange(attempt, code)
        finally:
            self._exchanges -= 1

    async def _exchange(self, attempt: OidcAttempt, code: str) -> Claims:
        metadata = await self._read_metadata()
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": attempt.redirect,
            "code_verifier": attempt.verifier,
            "client_id": self._settings.client_id,
        }
        headers = {"Content-Type": "application/x-www-form-urlencoded", "Accept": "application/json"}
        if self._settings.client_secret:
            secret = await asyncio.to_thread(loader.read_secret, self._settings.client_secret, os.environ)
            if "client_secret_basic" in metadata.token_endpoint_auth_methods_supported:
                pair = ":".join(map(urllib.parse.quote_plus, (self._settings.client_id, secret)))
                headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
            else:
                form["client_secret"] = secret
        response = await client.post(
            metadata.token_endpoint,
            urllib.parse.urlencode(form).encode(),
            headers=headers,
            body_bytes_max=BODY_MAX,
            tls=await self._tls(),
        )
        if response.status != 200:
            events.warning("oidc-refused", status=response.status, body=response.body[:300].decode("latin-1"))
            raise errors.Unauthorized("the identity provider refused the login", hint="log in again")
        tokens = _decode(response.body, TokenResponse, metadata.token_endpoint)
        claims = await self._verify(tokens.id_token, attempt.nonce)
        name, groups = claims.get(self._settings.name_claim), claims.get(self._settings.groups_claim)
        if (name is None or groups is None) and metadata.userinfo_endpoint and tokens.access_token:
            more = await self._get(metadata.userinfo_endpoint, dict[str, Any], bearer=tokens.access_token)
            if more.get("sub") != claims["sub"]:
                raise errors.Unauthorized("the identity provider answered for another person")
            claims = {**more, **claims}
            name, groups = claims.get(self._settings.name_claim), claims.get(self._settings.groups_claim)
        if not isinstance(name, str) or not name:
            raise errors.Forbidden(
                f"the identity provider sent no claim {self._settings.name_claim!r}",
                hint="set web.oidc.name_claim and web.oidc.scopes to what the provider sends",
            )
        members = [groups] if isinstance(groups, str) else groups if isinstance(groups, list) else []
        return Claims(name=name, groups=tuple(group for group in members if isinstance(group, str)))

    async def _verify(self, token: str, nonce: str) -> dict[str, Any]:
        try:
            header = jwt.get_unverified_header(token)
            key = await self._key(str(header.get("kid", "")))
            claims = jwt.decode(
                token,
                key=key,
                algorithms=list(ALGORITHMS),
                audience=self._settings.client_id,
                issuer=self._settings.issuer,
                leeway=LEEWAY_S,
                options={"require": ["iss", "sub", "aud", "exp", "iat"]},
            )
        except jwt.PyJWTError as error:
            raise errors.Unauthorized(f"the ID token is not valid: {error}", hint="log in again") from error
        if not hmac.compare_digest(str(claims.get("nonce", "")).encode(), nonce.encode()):
            raise errors.Unauthorized("the ID token is for another login", hint="log in again")
        if "azp" in claims and claims["azp"] != self._settings.client_id:
            raise errors.Unauthorized("the ID token is for another application")
        return dict(claims)

    async def _key(self, id: str) -> jwt.PyJWK:
        async with self._reading:
            now_s = time.monotonic()
            # A key that the provider has withdrawn is not accepted for longer than the metadata.
            if now_s - self._keys_read_s >= (METADATA_S if id in self._keys else KEYS_AGAIN_S):
                metadata = await self._read_metadata()
                document = await self._get(metadata.jwks_uri, dict[str, Any])
                self._keys = {
                    str(key.key_id or ""): key
                    for key in jwt.PyJWKSet.from_dict(document).keys
                    if key.public_key_use in (None, "sig")
                }
                self._keys_read_s = now_s
        if not id and len(self._keys) == 1:
            return next(iter(self._keys.values()))
        if id not in self._keys:
            raise errors.Unauthorized("the ID token is signed with an unknown key", hint="log in again")
        return self._keys[id]

    async def _read_metadata(self) -> ProviderMetadata:
        if self._metadata is not None and time.monotonic() - self._metadata[0] < METADATA_S:
            return self._metadata[1]
        address = self._settings.issuer.rstrip("/") + "/.well-known/openid-configuration"
        metadata: ProviderMetadata = await self._get(address, ProviderMetadata)
        if metadata.issuer != self._settings.issuer:
            raise errors.Refused(
                f"{address} describes the issuer {metadata.issuer[:200]!r}, not {self._settings.issuer!r}",
                hint="set web.oidc.issuer to exactly that text",
            )
        for url in (metadata.authorization_endpoint, metadata.token_endpoint, metadata.jwks_uri):
            settings_.check_provider_url(url, "an endpoint of the identity provider")
        self._metadata = (time.monotonic(), metadata)
        return metadata

    async def _get(self, url: str, kind: type[Any], *, bearer: str = "") -> Any:
        settings_.check_provider_url(url, "an endpoint of the identity provider")
        headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {bearer}"} if bearer else {})
        response = await client.request(
            "GET", url, headers=headers, body_bytes_max=BODY_MAX, tls=await self._tls()
        )
        if response.status != 200:
            raise errors.Unavailable(f"{url} answered with the status {response.status}")
        return _decode(response.body, kind, url)

    async def _tls(self) -> ssl.SSLContext:
        return await asyncio.to_thread(ssl.create_default_context, cafile=self._settings.ca or None)


def _decode(body: bytes, kind: type[Any], source: str) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise errors.Unavailable(f"{source} sent an invalid document: {error}") from error

"""The section ``web`` of a domain's settings."""

from __future__ import annotations

import urllib.parse
from typing import Annotated

from muster.core import errors
from muster.core.net import hosts
from muster.core.settings import sections

doc = sections.field_doc


class OidcSettings(sections.SettingsSection, frozen=True, kw_only=True):
    """Login with an OpenID Connect provider, beside passwords. Roles come from the provider's groups."""

    issuer: Annotated[
        str, doc("Address of the provider, exactly as its configuration names it. Empty: passwords only.")
    ] = ""
    client_id: Annotated[str, doc("Name under which the provider knows this dashboard.")] = ""
    client_secret: Annotated[
        sections.Secret, doc("Its secret. Empty: a public client, protected by PKCE alone.")
    ] = ""
    scopes: Annotated[
        tuple[str, ...], doc("Scopes to request besides `openid`; some providers need `groups`.")
    ] = ("profile",)
    name_claim: Annotated[
        str,
        doc("Claim that identifies a person. It must be unique and not changeable by the person."),
    ] = "preferred_username"
    name_prefix: Annotated[
        str,
        doc(
            "Put before the name of a person from the provider, so that it never equals the name of a local "
            "login or service.",
            pattern=r"^[A-Za-z0-9_-]{1,32}$(?!\n)",
        ),
    ] = "oidc-"
    groups_claim: Annotated[str, doc("Claim with the groups of a person: a list, or one name.")] = "groups"
    viewers: Annotated[
        tuple[str, ...], doc("Groups whose members are viewers. `*`: everyone the provider authenticates.")
    ] = ()
    operators: Annotated[tuple[str, ...], doc("Groups whose members are operators.")] = ()
    admins: Annotated[tuple[str, ...], doc("Groups whose members are admins.")] = ()
    url: Annotated[
        str,
        doc(
            "Address of the dashboard for browsers, such as https://muster.example.com. The provider sends "
            "them back to it, with /login/oidc/callback. Empty: the address that the browser uses."
        ),
    ] = ""
    ca: Annotated[
        sections.FilePath, doc("Certificate authorities of the provider in PEM. Empty: those of the system.")
    ] = ""

    def __post_init__(self) -> None:
        if not self.issuer:
            return
        check_provider_url(self.issuer, "web.oidc.issuer")
        if not self.client_id:
            raise errors.InvalidInput("web.oidc.issuer needs web.oidc.client_id")
        if not (self.viewers or self.operators or self.admins):
            raise errors.InvalidInput(
                "no group of the provider has a role",
                hint="set web.oidc.viewers, web.oidc.operators or web.oidc.admins",
            )
        if "*" in (*self.operators, *self.admins):
            raise errors.InvalidInput("`*` can be used in web.oidc.viewers only")


def check_provider_url(url: str, what: str) -> None:
    """`errors.InvalidInput` unless it is an https address, or an http address on loopback."""
    parts = urllib.parse.urlsplit(url)
    secure = parts.scheme == "https" or (parts.scheme == "http" and hosts.is_loopback(parts.hostname or ""))
    if not secure or not parts.hostname:
        raise errors.InvalidInput(f"{what} must be an https:// address, not {url[:200]!r}")


class WebSettings(sections.SettingsSection, frozen=True, kw_only=True):
    """The dashboard and the REST API, in a separate process that starts with the domain."""

    enabled: Annotated[bool, doc("Start it with the domain. Needs the extra `web`.")] = True
    host: Annotated[
        str, doc("Address to listen on. Other addresses than loopback need `cert` and `key`.")
    ] = "127.0.0.1"
    port: Annotated[
        hosts.Port,
        doc("Port to listen on. 0: a free port. If the port is in use, a free one is used and logged."),
    ] = 8480
    names: Annotated[
        tuple[str, ...],
        doc(
            "Host names for browsers, besides `host` and loopback. Requests for other names are rejected, to "
            "prevent DNS rebinding."
        ),
    ] = ()
    forwarded_header: Annotated[
        str,
        doc(
            "Header in which a proxy passes the client's address, such as X-Forwarded-For; its last entry is "
            "used to throttle failed logins. Empty: the peer of the connection is used. Set it only if every "
            "request comes through that proxy, since clients can send the header too."
        ),
    ] = ""
    cert: Annotated[sections.FilePath, doc("Server certificate in PEM; enables https.")] = ""
    key: Annotated[sections.FilePath, doc("Its private key.")] = ""
    session_s: Annotated[
        float,
        doc(
            "Lifetime of a session. Shorter: a stolen cookie is useful for less time; longer: fewer logins.",
            ge=60,
        ),
    ] = 12 * 3600.0
    token_s: Annotated[
        float, doc("Longest lifetime of an API token, and the lifetime of those that ask for none.", ge=60)
    ] = 30 * 86400.0
    oidc: OidcSettings = OidcSettings()

    def __post_init__(self) -> None:
        if bool(self.cert) != bool(self.key):
            raise errors.InvalidInput("web.cert and web.key must be set together")
        if not hosts.is_loopback(self.host) and not self.cert:
            raise errors.InvalidInput(
                f"web.host {self.host} is not loopback: without TLS, passwords would be sent unencrypted",
                hint="set web.cert and web.key, or use a TLS proxy in front of loopback",
            )

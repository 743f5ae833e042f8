"""Requests on the system account of the brokers, each over its own short connection."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from muster.bus.brokers import config
from muster.bus.client import client, credential_source
from muster.core import errors

TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemAccess:
    """Access to the system account: credentials with an operator, a password without one."""

    credentials: credential_source.CredentialSource | None = None
    password: str | None = None
    tls: config.BrokerTls | None = None


async def request(
    addresses: Sequence[str], access: SystemAccess, subject: str, payload: dict[str, Any] | bytes
) -> dict[str, Any]:
    """Send a request to the responsible broker, and raise the error of its reply."""
    data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    async with await _connect(addresses, access) as bus:
        reply = await bus.request(subject, data, timeout_s=TIMEOUT_S)
    answer = json.loads(reply.data)
    if "error" in answer:
        raise errors.Refused(f"{subject}: {answer['error'].get('description', answer['error'])}")
    return dict(answer)


async def gather(
    addresses: Sequence[str],
    access: SystemAccess,
    subject: str,
    *,
    enough: int,
    timeout_s: float = 1.0,
    payload: bytes = b"",
) -> list[dict[str, Any]]:
    """Send a request to every broker, and collect replies until there are ``enough`` or the time has
    passed."""
    async with await _connect(addresses, access) as bus:
        return [
            json.loads(reply.data)
            for reply in await bus.gather(subject, payload, enough=enough, timeout_s=timeout_s)
        ]


async def _connect(addresses: Sequence[str], access: SystemAccess) -> client.NatsBus:
    """``addresses`` are host:port."""
    if access.credentials is None and access.password is None:
        raise errors.MissingDependency(
            "this needs the brokers' system account",
            hint="give credentials of the system account or, where there is no trust, a system secret",
        )
    user = config.user_info(config.SYSTEM_USER, access.password) if access.password else ""
    tls = None if access.tls is None else await asyncio.to_thread(_context, access.tls)
    scheme = "nats" if tls is None else "tls"
    urls = [f"{scheme}://{user}{address}" for address in addresses]
    identity = config.SYSTEM_USER if access.credentials is None else None
    return await client.connect(
        urls, identity=identity, creds=access.credentials, tls=tls, connect_timeout_s=TIMEOUT_S, audit_s=0
    )


def _context(tls: config.BrokerTls) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(tls.ca_file))
    context.load_cert_chain(tls.cert_file, tls.key_file)
    return context

"""Requests on the brokers' system account, each over a connection of its own that ends with the answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nats
import nats.errors
from nats.aio.client import Client as NATS

from muster.bus.brokers import config
from muster.core import errors

TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How to reach the system account: a credentials file where there is trust, a password where there is
    none."""

    credentials_file: Path | None = None
    password: str | None = None
    tls: config.Tls | None = None


async def request(
    urls: Sequence[str],
    access: Access,
    subject: str,
    payload: dict[str, Any],
    *,
    timeout_s: float = TIMEOUT_S,
) -> dict[str, Any]:
    """Ask whoever is responsible, and raise what the answer complains of."""
    async with _connected(urls, access, timeout_s) as client:
        try:
            reply = await client.request(subject, json.dumps(payload).encode(), timeout=timeout_s)
        except nats.errors.NoRespondersError as error:
            raise errors.Unavailable(f"nobody answers {subject}: the storage has no leader") from error
        except (nats.errors.TimeoutError, nats.errors.ConnectionClosedError) as error:
            raise errors.TimedOut(f"no answer to {subject} in {timeout_s:g} s") from error
    answer = json.loads(reply.data)
    if "error" in answer:
        raise errors.Refused(f"{subject}: {answer['error'].get('description', answer['error'])}")
    return dict(answer)


async def gather(
    urls: Sequence[str], access: Access, subject: str, *, enough: int, timeout_s: float = 1.0
) -> list[dict[str, Any]]:
    """Ask every broker, and collect answers until there are ``enough`` or time is up."""
    answers: list[dict[str, Any]] = []
    async with _connected(urls, access, TIMEOUT_S) as client:
        inbox = await client.subscribe(client.new_inbox())
        await client.publish(subject, b"", reply=inbox.subject)
        with contextlib.suppress(nats.errors.TimeoutError, nats.errors.ConnectionClosedError, TimeoutError):
            async with asyncio.timeout(timeout_s):
                while len(answers) < enough:
                    answers.append(json.loads((await inbox.next_msg(timeout=timeout_s)).data))
    return answers


@contextlib.asynccontextmanager
async def _connected(urls: Sequence[str], access: Access, timeout_s: float) -> AsyncIterator[NATS]:
    options: dict[str, Any] = {"allow_reconnect": False, "connect_timeout": timeout_s, "error_cb": _ignore}
    if access.credentials_file is not None:
        options["user_credentials"] = str(access.credentials_file)
    elif access.password is not None:
        options |= {"user": config.SYSTEM_USER, "password": access.password}
    else:
        raise errors.MissingPart(
            "this needs the brokers' system account",
            hint="give a credentials file of the system account or, where there is no trust, a system secret",
        )
    if access.tls is not None:
        options["tls"] = await asyncio.to_thread(_tls, access.tls)
    try:
        client = await nats.connect(list(urls), **options)
    except nats.errors.AuthorizationError as error:
        raise errors.Unauthorized("the system account refused our credentials") from error
    except (nats.errors.Error, OSError, TimeoutError) as error:
        raise errors.NotConnected(f"no broker answers: {error}") from error
    try:
        yield client
    finally:
        with contextlib.suppress(nats.errors.Error):
            await client.close()


def _tls(tls: config.Tls) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(tls.ca_file))
    context.load_cert_chain(tls.cert_file, tls.key_file)
    return context


async def _ignore(error: Exception) -> None:
    """The call itself raises what matters."""

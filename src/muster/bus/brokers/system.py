"""Requests on the brokers' system account, each over a connection of its own that ends with the answer."""

from __future__ import annotations

import contextlib
import json
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nats
import nats.errors

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
    """Ask, and raise what the answer complains of."""
    options: dict[str, Any] = {"allow_reconnect": False, "connect_timeout": timeout_s, "error_cb": _ignore}
    if access.credentials_file is not None:
        options["user_credentials"] = str(access.credentials_file)
    elif access.password is not None:
        options |= {"user": config.SYSTEM_USER, "password": access.password}
    else:
        raise errors.MissingPart(
            "changing where durable storage lives needs the system account",
            hint="give the network a credentials file of the system account, or a system secret",
        )
    if access.tls is not None:
        context = ssl.create_default_context(cafile=str(access.tls.ca_file))
        context.load_cert_chain(access.tls.cert_file, access.tls.key_file)
        options["tls"] = context
    try:
        client = await nats.connect(list(urls), **options)
    except nats.errors.AuthorizationError as error:
        raise errors.Unauthorized("the system account refused our credentials") from error
    except (nats.errors.Error, OSError, TimeoutError) as error:
        raise errors.NotConnected(f"no broker answers: {error}") from error
    try:
        answer = json.loads(
            (await client.request(subject, json.dumps(payload).encode(), timeout=timeout_s)).data
        )
    except nats.errors.NoRespondersError as error:
        raise errors.Unavailable(f"nobody answers {subject}: the storage has no leader") from error
    except (nats.errors.TimeoutError, nats.errors.ConnectionClosedError) as error:
        raise errors.TimedOut(f"no answer to {subject} in {timeout_s:g} s") from error
    finally:
        with contextlib.suppress(nats.errors.Error):
            await client.close()
    if "error" in answer:
        raise errors.Refused(f"{subject}: {answer['error'].get('description', answer['error'])}")
    return dict(answer)


async def _ignore(error: Exception) -> None:
    """The call itself raises what matters."""

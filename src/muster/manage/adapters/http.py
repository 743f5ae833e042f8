"""A service with an HTTP interface: checked by its health URL, changed by configured requests.

``start``, ``stop`` and ``configure`` are the requests to send; a service without them is only monitored.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Annotated, Any, Literal

import msgspec

from muster.bus.http import client
from muster.core import errors, health
from muster.core.settings import sections
from muster.manage import protocol
from muster.manage.adapters import base

doc = sections.field_doc


class HttpCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A request to the service."""

    url: Annotated[str, doc("Address of the request.")]
    method: Annotated[Literal["GET", "POST", "PUT", "DELETE"], doc("Method.")] = "POST"


class HttpServiceConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A service that runs elsewhere and is operated by HTTP requests."""

    health_url: Annotated[str, doc("The service is up if this address returns a status below 400.")]
    every_s: Annotated[float, doc("Interval between checks.", gt=0, le=3600)] = 5.0
    timeout_s: Annotated[float, doc("Time limit of a request.", gt=0, le=600)] = 3.0
    failures: Annotated[int, doc("Consecutive failures before it is down.", ge=1, le=100)] = 2
    start: Annotated[HttpCall | None, doc("The request that starts it.")] = None
    stop: Annotated[HttpCall | None, doc("The request that stops it.")] = None
    configure: Annotated[HttpCall | None, doc("The request that receives `settings` as JSON.")] = None
    settings: Annotated[dict[str, Any], doc("What `configure` sends.")] = {}


class HttpAdapter(base.Adapter):
    type_name = "http"
    config_type = HttpServiceConfig
    _config: HttpServiceConfig | None

    def __init__(self, context: base.AdapterContext) -> None:
        super().__init__(context)
        self._state = health.HealthState.DOWN
        self._reason = "not checked yet"
        self._probes = 0  # number of probes started
        self._latest_probe = 0  # the probe whose result is current

    async def create(self, config: HttpServiceConfig, *, start: bool) -> None:
        await self.put(config)
        if start:
            await self.do_start()

    async def put(self, config: HttpServiceConfig) -> None:
        self._config = config
        if config.configure is not None:
            await _call(config.configure, config.timeout_s, config.settings)
        await self._restart_watch()

    async def delete(self) -> None:
        if self._config is not None and self._config.stop is not None:
            with contextlib.suppress(errors.Unavailable):  # a service that is gone cannot be asked
                await self.do_stop()
        await self.close()
        self._config = None

    async def observe(self) -> protocol.ObservedState:
        return protocol.ObservedState(self._config is not None, self._state, self._reason)

    async def resume(self, config: HttpServiceConfig) -> None:
        self._config = config
        await self._restart_watch()

    async def do_start(self) -> None:
        config = self._require()
        if config.start is not None and self._state is not health.HealthState.UP:
            await _call(config.start, config.timeout_s)
        await self._check_now()

    async def do_stop(self) -> None:
        config = self._require()
        if config.stop is None:
            raise errors.Refused(f"{self.context.name} has no stop request")
        await _call(config.stop, config.timeout_s)
        await self._check_now()

    async def _restart_watch(self) -> None:
        await self.close()
        await self._check_now()
        self.watch(self._watch)

    async def _watch(self) -> None:
        failed = 0
        while True:
            config = self._require()
            await asyncio.sleep(config.every_s)
            probe, problem = await self._probe(config)
            failed = 0 if problem is None else failed + 1
            if problem is None or failed >= config.failures:
                self._set_state(probe, problem)

    async def _check_now(self) -> None:
        self._set_state(*await self._probe(self._require()))

    async def _probe(self, config: HttpServiceConfig) -> tuple[int, str | None]:
        """The number of this probe, and the problem if the service does not work."""
        self._probes += 1
        probe = self._probes
        return probe, await _problem(config)

    def _set_state(self, probe: int, problem: str | None) -> None:
        if probe < self._latest_probe:  # a later probe has finished: this result may predate a stop
            return
        self._latest_probe = probe
        self._state = health.HealthState.UP if problem is None else health.HealthState.DOWN
        self._reason = problem or ""
        self.context.report_state(protocol.ObservedState(True, self._state, self._reason))


async def _problem(config: HttpServiceConfig) -> str | None:
    try:
        answer = await client.get(config.health_url, timeout_s=config.timeout_s)
    except errors.MusterError as error:
        return error.message
    return None if answer.status < 400 else f"{config.health_url} returned {answer.status}"


async def _call(call: HttpCall, timeout_s: float, body: dict[str, Any] | None = None) -> None:
    response = await client.request(
        call.method,
        call.url,
        msgspec.json.encode(body or {}),
        headers={"Content-Type": "application/json"},
        timeout_s=timeout_s,
    )
    if response.status >= 400:
        raise errors.Refused(f"{call.method} {call.url} returned HTTP status {response.status}")

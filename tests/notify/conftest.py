from __future__ import annotations

import contextlib

import pytest

from muster.bus.client import client as bus_client
from muster.notify import client, models
from muster.notify import settings as settings_
from muster.notify.matcher import kernels_numpy
from muster.notify.notifier import notifier as notifier_notifier
from muster.predicates import types

WEB_SERVER = models.Model(
    "WebServer",
    {
        "application": types.STRING,
        "application_version": types.STRING,
        "serviceIPAddress": types.STRING,
        "servicePort": types.INT,
        "services": types.set_of("docs", "cgi", "xml"),
        "load": types.FLOAT,
    },
)
CONTROLLER = models.Model(
    "Controller", {"entity": types.STRING, "_command_region": types.STRING, "_trust_level": types.INT}
)
ALERT = models.Model("alert", {"threat_level": types.INT, "text": types.STRING}, models.ModelKind.EVENT)
COMMAND = models.Model("command", {"action": types.STRING}, models.ModelKind.EVENT)
MODELS = (WEB_SERVER, CONTROLLER, ALERT, COMMAND)

QUICK = settings_.NotifySettings(lease_s=3.0, ack_wait_s=0.5, beat_s=0.1)


@pytest.fixture
async def connect(broker):
    async with contextlib.AsyncExitStack() as stack:

        async def make(identity):
            return await stack.enter_async_context(
                await bus_client.connect([broker.url], identity=identity, audit_s=0)
            )

        yield make


@pytest.fixture
async def notifier(connect):
    """Start notifiers: ``await notifier("n1")``."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(name="n1", settings=QUICK, *, serving=True, **more):
            made = notifier_notifier.Notifier(await connect(name), settings, kernels=kernels_numpy, **more)
            await stack.enter_async_context(made)
            if serving:
                await made.serving()
            return made

        yield start


@pytest.fixture
async def receivers(connect):
    """A process with its receivers: ``await receivers("p1")``."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(process, **more):
            return await stack.enter_async_context(client.NotifyClient(await connect(process), **more))

        yield start


@pytest.fixture(params=["plain", "compiled"])
def kernels(request):
    if request.param == "plain":
        return kernels_numpy
    pytest.importorskip("numba")
    from muster.notify.matcher import kernels_numba

    return kernels_numba

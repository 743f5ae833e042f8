"""An AMQP gateway on a broker with a dispatcher."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from muster.bus import api
from muster.core.telemetry import metrics
from muster.message.dispatcher import leadership
from muster.testing import fixtures
from muster.trust.login import password_checker, passwords
from muster.trust.permissions import roles

if TYPE_CHECKING:
    from muster.gateways.amqp import gateway as amqp_gateway


@pytest.fixture(scope="module")
def verifiers(tmp_path_factory: pytest.TempPathFactory) -> passwords.PasswordStore:
    """Made once: that takes long on purpose."""
    made = passwords.PasswordStore(tmp_path_factory.mktemp("passwords"))
    made.set("ann", roles.Role.USER, "correct horse", mechanisms=("SCRAM-SHA-256", "SCRAM-SHA-512"))
    return made


@pytest.fixture
def measured() -> metrics.Metrics:
    return metrics.Metrics()


@pytest_asyncio.fixture
async def gateway(
    dispatcher: leadership.DispatcherLeadership,
    connect: fixtures.Connect,
    verifiers: passwords.PasswordStore,
    measured: metrics.Metrics,
) -> AsyncIterator[amqp_gateway.AmqpGateway]:
    pytest.importorskip("proton", reason="python-qpid-proton is not installed")
    from muster.gateways.amqp import gateway as amqp_gateway

    async def dial(login: passwords.PasswordLogin) -> api.Bus:
        return await connect(login.name)

    def may(identity: str, action: str, subject: str) -> bool:
        return not subject.startswith("topic.secret.")

    async with amqp_gateway.AmqpGateway(
        dial, password_checker.PasswordChecker(verifiers), anonymous="nobody", may=may, measure=measured
    ) as started:
        yield started

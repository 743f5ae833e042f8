"""What Java applications use around a JMS client, against a gateway."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.gateways.amqp import java_project

if TYPE_CHECKING:
    from muster.gateways.amqp import gateway as amqp_gateway


@pytest.mark.slow
async def test_spring_a_pool_and_jndi(gateway: amqp_gateway.AmqpGateway, tmp_path: Path):
    classpath = await java_project.classpath(tmp_path, "java_spring")
    url = f"amqp://127.0.0.1:{gateway.port}"
    code, output = await java_project.output("java", "-cp", classpath, "Containers", url, cwd=tmp_path)
    assert code == 0, output
    assert "ok spring_listener_container_scales_and_receives_all" in output


@pytest.mark.slow
@pytest.mark.timeout(400)  # as for jakarta.jms
async def test_qpid_jms_for_javax(gateway: amqp_gateway.AmqpGateway, tmp_path: Path):
    """The same program as for jakarta.jms, with the older package and client."""
    classpath = await java_project.classpath(tmp_path, "java_javax")
    gateway.max_message_bytes = 8 << 20
    url = f"amqp://127.0.0.1:{gateway.port}"
    code, output = await java_project.output("java", "-cp", classpath, "Conformance", url, cwd=tmp_path)
    assert code == 0, output

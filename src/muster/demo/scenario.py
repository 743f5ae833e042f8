"""The parameters of the outbreak: settings of the domain, a rule, models, the policy of the servers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from muster.core import subjects
from muster.demo import controllers, web_farm, worm
from muster.notify import models
from muster.predicates import types

RULES = f"""\
rules:
  - name: {controllers.RULE}
    scope: group                       # the servers of a region that run one version
    when: own.infected_mean > 0.005
    until: own.infected_mean = 0
    severity: critical
    summary: "{{value:.1%}} of {{about}} are infected"
"""
RULES_NAME = "outbreak-rules.yaml"

SERVER = models.Model(
    web_farm.MODEL,
    dict.fromkeys(("application", "application_version", "region", "condition"), types.STRING),
)
CONTROLLER = models.Model("Controller", {"_command_region": types.STRING, "_trust_level": types.INT})
COMMAND = models.Model("command", {"operation": types.STRING}, models.ModelKind.EVENT)
MODELS = (SERVER, CONTROLLER, COMMAND)


@dataclass(frozen=True, slots=True)
class ScenarioOptions:
    plan: worm.WormPlan = field(default_factory=worm.WormPlan)
    farms: int = 2
    brokers: int = 3
    period_s: float = 5.0
    delay_s: float = 3.0  # maximum delay of reports to Spark
    kill: bool = True
    start_s_max: float = 240.0
    contain_s_max: float = 300.0


def flags(folder: Path, options: ScenarioOptions) -> dict[str, Any]:
    """Return the settings of the domain for the scenario."""
    return {
        "bus.port": 0,
        "bus.brokers": options.brokers,
        "channel.enabled": True,
        "channel.hold_s": "500ms",
        "manage.enabled": True,
        "manage.managers": 2,
        "manage.agent": False,
        "pipeline.enabled": True,
        "pipeline.trigger_s": "2s",
        "pipeline.window_s": f"{options.period_s:g}s",
        "pipeline.delay_s": f"{options.delay_s:g}s",
        "pipeline.rules": str(folder / RULES_NAME),
    }


def prepare(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RULES_NAME).write_text(RULES)


def policy(region: str) -> str:
    """Return the policy of a server in a region, in the notation of the paper."""
    return (
        f'{{ command AND (sender: (_command_region == "{subjects.token(region)}" AND _trust_level >= 2)) }}'
    )

"""The formats of the files that people write: JSON Schema for editors, complete examples.

Everything is derived from the types that read the files.  `muster schema` prints a schema; the
page of manifests in the documentation lists all fields.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from muster.loop import reaction_rules, response_rules
from muster.manage import manifest
from muster.manage.adapters import plugins
from muster.pipeline.alerts import notifications, rules

DIALECT = "https://json-schema.org/draft/2020-12/schema"


class RuleFile(msgspec.Struct, frozen=True):
    """A file of alert rules, and of the contacts that they notify."""

    rules: tuple[rules.AlertRule, ...] = ()
    contacts: dict[str, notifications.AlertContact] = {}


@dataclass(frozen=True, slots=True)
class FileFormat:
    title: str
    type: type[msgspec.Struct]
    intro: str
    example: str
    check: Callable[[str], object]  # raises `errors.InvalidInput` for an invalid file


def _check_manifest(text: str) -> object:
    return manifest.read(text, plugins.config_validators(), plugins.can_move, plugins.has_hooks)


def _check_rules(text: str) -> object:
    return rules.parse(text), notifications.parse_contacts(text, "contacts")


MANIFEST = """\
resources:
  - name: db                      # a process with a health check, limits and a secret
    type: process
    agent: local
    group: shop
    config:
      command: [python3, -m, http.server, "8081"]
      environment:
        LOG_LEVEL: info
        DB_PASSWORD: {secret: "store:db-password"}
      directory: /tmp
      health: {kind: http, url: "http://127.0.0.1:8081/", every_s: 5, failures: 2, start_s: 60}
      limits: {memory_bytes: 1073741824, open_files: 4096}
      umask: "027"
      stop_signal: INT
      stop_s: 30
    restart: {policy: on-failure, attempts: 3, window_s: 600, delay_s: 1}
  - name: worker                  # worker-1, worker-2 and worker-3, in different zones if there are several
    type: process
    count: 3
    placement: {cpu: 0.5, memory_mb: 256}
    update: {max_parallel: 1, canary: 1, min_healthy_time_s: 30, healthy_deadline_s: 120}
    group: shop
    reschedule: {after_s: 30}     # on another machine, if its own is lost
    config: {command: [python3, -m, http.server, "{9000+index}"]}
  - name: migrate                 # a job: it runs once for each version
    type: process
    where: zone = 'default'
    group: shop
    job: {deadline_s: 600}
    depends_on: [db]
    config: {command: [python3, -c, "print('migrated')"]}
  - name: report                  # a periodic job
    type: process
    where: zone = 'default'
    schedule: {cron: "30 2 * * mon-fri", time_zone: Europe/Berlin, concurrency: forbid, missed: last}
    job: {keep: 30}
    restart: {policy: on-failure, attempts: 2}
    config: {command: [python3, -c, "print('a report')"]}
  - name: front                   # hosted by any agent that matches; started after db
    type: process
    where: zone = 'default' AND os = 'linux'
    group: shop
    labels: {tier: front}
    depends_on: [db, migrate]
    hooks: {pre_stop: {command: [sleep, "5"], timeout_s: 10}}
    config:
      command: [python3, -m, http.server, "8080"]
      health: {kind: port, port: 8080}
  - name: search                  # a service elsewhere, operated by HTTP requests
    type: http
    agent: local
    config:
      health_url: http://127.0.0.1:9200/health
      start: {url: "http://127.0.0.1:9200/start"}
      stop: {url: "http://127.0.0.1:9200/stop"}
      configure: {url: "http://127.0.0.1:9200/settings", method: PUT}
      settings: {replicas: 2}
  - name: cache                   # a container of Podman or Docker
    type: container
    agent: local
    config:
      image: docker.io/library/redis:7
      ports: ["127.0.0.1:6379:6379"]
      volumes: ["cache:/data"]
      limits: {memory_bytes: 268435456}
  - name: cache-settings          # a file with values and secrets
    type: file
    agent: local
    config:
      path: /etc/shop/cache.conf
      content: "port {{port}}\\nrequirepass {{password}}\\n"
      values: {port: "6379", password: {secret: "store:cache"}}
      mode: "0640"
  - name: backup                  # a unit of systemd
    type: systemd
    agent: local
    desired: down
    config: {unit: backup.timer, every_s: 10}
  - name: totals                  # a streaming query of Spark
    type: spark-query
    agent: local
    depends_on: ["group:shop"]
    config: {script: /opt/totals.py, master: "local[2]", checkpoint: /var/lib/totals, progress_s: 120}
  - name: edge                    # a broker that links to another one
    type: broker
    agent: local
    depends_on: [mesh-1]
    config: {links: [mesh-1]}
topologies:
  - {name: mesh, shape: ring, size: 3, agent: local}
"""

RULES = """\
rules:
  - name: hot
    scope: node                  # node, group, zone or system
    when: cpu_percent > 95
    until: cpu_percent < 80      # hysteresis
    for: 30s
    severity: critical           # info, warning or critical
    summary: "{about} is at {value:.0f} %"
    labels: {team: web}
    notify: [team-web, on-call]
  - name: silent
    scope: node
    when: age_s > 3 * period_s
  - name: no-data
    scope: group
    only: [web, db]              # also if they never reported
    when: reports = 0
contacts:
  team-web:                      # a template for Slack; its address is a secret
    webhook: {secret: "file:/run/keys/slack-url"}
    body: {text: "*{severity}* {summary} ({about}, {state})"}
  on-call:
    mail: [ann@example.org]
    webhook: https://relay.example/alerts
    format: alertmanager         # what Alertmanager sends to webhooks
    headers: {Authorization: {secret: "env:RELAY_TOKEN", prefix: "Bearer "}}
"""

RESPONSES = """\
responses:
  - alert: hot                   # the rule that raised it; * for any
    when: state = 'firing' AND severity = 'critical'
    event: command
    content: {operation: restart, reason: "{rule} of {name}"}
    to: host = {name}            # to the receivers that this address selects
"""

REACTIONS = """\
reactions:
  - where: group = 'shop'        # the resources that become receivers
    model: Server
    state: {application: "{group}", host: "{agent}"}
    policy: "command AND sender: (_process = 'responder')"
    operations: [restart, stop]  # what an event may request in its attribute `operation`
"""

FORMATS = {
    "manifest": FileFormat(
        "Manifests",
        manifest.ManifestDocument,
        "The desired state of resources, for `muster apply`, `plan`, `diff` and `delete`. "
        "[Manage your first service](../guides/first-service.md) is an introduction.",
        MANIFEST,
        _check_manifest,
    ),
    "rules": FileFormat(
        "Alert rules",
        RuleFile,
        "The file of the setting `pipeline.rules`. [The pipeline](pipeline.md#rules) lists the attributes of "
        "conditions.",
        RULES,
        _check_rules,
    ),
    "responses": FileFormat(
        "Responses",
        response_rules.ResponseFile,
        "The file of the setting `responder.rules`: it turns alerts into events. "
        "[Close the loop](../guides/loop.md) shows it together with rules and reactions.",
        RESPONSES,
        response_rules.load,
    ),
    "reactions": FileFormat(
        "Reactions",
        reaction_rules.ReactionFile,
        "The file of the setting `reactions.rules`: it turns accepted events into operations of resources.",
        REACTIONS,
        reaction_rules.load,
    ),
}


def schema(name: str) -> dict[str, Any]:
    """JSON Schema of a format, with the types of resources that are known on this machine."""
    form = FORMATS[name]
    document = msgspec.json.schema(form.type)
    definitions = document["$defs"]
    if name == "manifest":
        entry = definitions["ManifestEntry"]
        known = plugins.names()
        entry["properties"]["type"]["enum"] = known
        entry["not"] = {"required": ["agent", "where"]}
        entry["anyOf"] = [{"required": [field]} for field in ("agent", "where", "count", "placement")]
        adapters: dict[str, type] = {kind: plugins.load_adapter(kind).config_type for kind in known}
        # An adapter of a program may accept any mapping.
        configs = {kind: config for kind, config in adapters.items() if issubclass(config, msgspec.Struct)}
        _, components = msgspec.json.schema_components(configs.values(), ref_template="#/$defs/{name}")
        definitions |= components
        entry["allOf"] = [
            {
                "if": {"properties": {"type": {"const": kind}}},
                "then": {"properties": {"config": {"$ref": f"#/$defs/{config.__name__}"}}},
            }
            for kind, config in configs.items()
        ]
    if name == "rules":
        properties = definitions["AlertRule"]["properties"]
        properties["for"] = {**properties.pop("for_s"), "type": ["number", "string"], "default": 0}
    return {"$schema": DIALECT, "title": form.title, **document}

"""The files in deploy/ match the code: metrics exist, units and configurations are well-formed."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
import shutil
import subprocess
import venv
from pathlib import Path

import click
import pytest
import yaml

from muster.app import settings
from muster.app.machines import program
from muster.app.operations import systemd_unit
from muster.bus.client import counters
from muster.cli import main
from muster.core.telemetry import metrics
from muster.manage.agent import resource_metrics
from muster.pipeline.job import progress
from muster.testing.plugin import require_part
from tests import debian
from tests.cli import driver
from tests.gateways.amqp import java_project

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
KINDS = {"counter": "_total", "gauge": "", "histogram": "_bucket"}


def exported() -> set[str]:
    """Full names of all metrics: those that the source names, and those made from tables."""
    actual = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in KINDS
                and node.args
                and isinstance(node.args[0], ast.Constant)
            ):
                actual.add(f"muster_{node.args[0].value!s}{KINDS[node.func.attr]}")
    tables = metrics.Metrics(process=True)
    counters.ConnectionCounters(tables)
    progress.ProgressMetrics(tables)
    resource_metrics.ResourceMetrics(tables, {})
    text = tables.exposition()[1].decode()
    return actual | set(re.findall(r"^# HELP (\w+)", text, re.MULTILINE))


def named(text: str) -> set[str]:
    return set(re.findall(r"\b(?:muster|process)_[a-z_]+", text))


def expressions() -> str:
    rules = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())
    board = json.loads((DEPLOY / "grafana/muster.json").read_text())
    return "\n".join(
        [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
        + [target["expr"] for panel in board["panels"] for target in panel["targets"]]
        + [row["query"] for row in board["templating"]["list"]]
    )


def test_every_metric_that_a_rule_or_a_panel_names_is_exported():
    expected = named(expressions())
    assert len(expected) > 15
    assert expected - exported() == set()


def test_panels_do_not_lie_on_each_other():
    panels = json.loads((DEPLOY / "grafana/muster.json").read_text())["panels"]
    seen: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & seen, panel["title"]
        seen |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)


@pytest.mark.parametrize("words", [("check", "config", "prometheus.yml"), ("check", "rules", "alerts.yml")])
def test_prometheus_itself_accepts_its_files(words: tuple[str, ...]):
    debian.PROMTOOL.require()
    done = subprocess.run(
        ["promtool", *words], cwd=DEPLOY / "prometheus", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_itself_understands_what_the_panels_ask(tmp_path: Path):
    debian.PROMTOOL.require()
    board = json.loads((DEPLOY / "grafana/muster.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    rules = [
        {"record": f"panel:{number}", "expr": expression.replace("$domain", ".*")}
        for number, expression in enumerate(queries)
    ]
    file = tmp_path / "panels.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(queries)} rules found" in done.stdout


def test_the_dashboard_has_the_form_that_grafana_reads_and_is_found_by_it():
    board = json.loads((DEPLOY / "grafana/muster.json").read_text())
    assert board["schemaVersion"] >= 36  # since then data sources are named by type and uid
    assert {"title", "uid", "panels", "templating", "time"} <= set(board)
    variables = {row["name"] for row in board["templating"]["list"]}
    for panel in board["panels"]:
        assert panel["type"] in ("stat", "timeseries"), panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${source}"}
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters) > 0
        unit = panel["fieldConfig"]["defaults"]["unit"]
        assert unit
        assert unit != "bytes", "GiB: elsewhere sizes are in GB, which is decbytes"
        text = json.dumps(panel)
        assert set(re.findall(r"\$\{?([a-z]+)", text)) <= variables, panel["title"]
    provided = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/muster.yaml").read_text())
    (source,) = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    assert (source["type"], source["isDefault"]) == ("prometheus", True)
    grafana = yaml.safe_load((DEPLOY / "container/compose.yaml").read_text())["services"]["grafana"]
    mounted = dict(volume.split(":")[:2] for volume in grafana["volumes"])
    assert mounted["../grafana"] == provided["providers"][0]["options"]["path"]
    assert mounted["../grafana/provisioning"] == "/etc/grafana/provisioning"


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_units_name_commands_that_exist_and_are_confined(unit: Path):
    text = unit.read_text()
    (line,) = re.findall(r"^ExecStart=/opt/muster/bin/muster (.*)$", text, re.MULTILINE)
    words = line.replace("%i", "sensor").replace("$OPTIONS", "").split()
    command: click.Command = main.muster
    context = click.Context(command, **command.context_settings)
    while words and isinstance(command, click.Group):
        actual = command.get_command(context, words[0])
        if actual is None:
            break
        command, words = actual, words[1:]
    # Below the root: a command keeps the names of its help from the first time that it is asked.
    made = command.make_context(command.name, words, parent=context, resilient_parsing=False)
    assert made.command is command
    for word in ("NoNewPrivileges=yes", "CapabilityBoundingSet=\n", "PrivateTmp=yes", "UMask=0077"):
        assert word in text


def test_the_unit_of_the_domain_is_the_one_that_muster_prints():
    printed = systemd_unit.unit(
        program=Path("/opt/muster/bin/muster"), home=Path("/var/lib/muster"), user="muster"
    )
    file = DEPLOY / "systemd/muster.service"
    if os.environ.get("REWRITE"):
        file.write_text(printed)
    assert file.read_text() == printed
    lines = (
        "Type=notify",
        "Restart=on-failure",
        "StartLimitIntervalSec=0",
        "WatchdogSec=3",
        "KillMode=process",
    )
    for line in lines:
        assert f"\n{line}\n" in printed


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_systemd_itself_accepts_the_units(tmp_path: Path):
    for unit in UNITS:
        text = re.sub(r"/opt/muster/bin/muster", "/bin/true", unit.read_text())
        (tmp_path / unit.name.replace("@", "@x")).write_text(
            re.sub(r"^(User|Group)=.*\n", "", text, flags=re.M)
        )
    for name, user, home in (("own", "", "/srv/a b%c/.muster"), ("elsewhere", "root", "/srv/muster")):
        printed = systemd_unit.unit(program=Path("/bin/true"), home=Path(home), user=user)
        (tmp_path / f"muster-{name}.service").write_text(printed)
    files = sorted(map(str, tmp_path.iterdir()))
    done = subprocess.run(
        ["systemd-analyze", "verify", *files], capture_output=True, text=True, check=False, timeout=60
    )
    ours = [line for line in done.stderr.splitlines() if "muster" in line]
    assert ours == [], done.stderr
    assert done.returncode == 0


def test_the_container_files_hang_together():
    compose = yaml.safe_load((DEPLOY / "container/compose.yaml").read_text())
    for name, service in compose["services"].items():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in compose["volumes"] or (DEPLOY / "container" / source).is_dir(), (name, volume)
        for other in service.get("depends_on", {}):
            assert other in compose["services"]
        if service["image"] == "muster":
            command, *_ = service["command"]
            assert command in main.COMMANDS
            assert service["cap_drop"] == ["ALL"]
            assert service["read_only"] is True
    steps = re.findall(r"^([A-Z]+) ", (DEPLOY / "container/Containerfile").read_text(), re.MULTILINE)
    known = {"FROM", "COPY", "RUN", "ENV", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK"}
    assert set(steps) <= known | {"ENTRYPOINT", "CMD"}
    assert steps.index("USER") < steps.index("ENTRYPOINT")
    text = (DEPLOY / "container/Containerfile").read_text()
    assert re.search(
        r"^USER [1-9]\d*$", text, re.MULTILINE
    )  # a number: Kubernetes can see that it is not root
    assert "latest" not in text
    assert all(":" in image for image in re.findall(r"^FROM (\S+)", text, re.MULTILINE))
    for words in re.findall(r"^(?:ENTRYPOINT|CMD|HEALTHCHECK .*CMD) (.*)$", text, re.MULTILINE):
        program, *rest = json.loads(words)  # a list: no shell between the signal and the process
        assert program == "muster" or [program, *rest] == ["up"]


def test_the_containers_ports_are_those_that_muster_has_by_itself():
    domain = yaml.safe_load((DEPLOY / "container/compose.yaml").read_text())["services"]["domain"]
    init = main.muster.get_command(click.Context(main.muster), "init")
    assert init is not None
    clients = next(parameter.default for parameter in init.params if parameter.name == "port")
    web = settings.Settings().web.port
    assert domain["ports"] == [f"127.0.0.1:{port}:{port}" for port in (clients, web)]
    (health,) = (word.partition("health.port=")[2] for word in domain["command"] if "health.port=" in word)
    (exposed,) = re.findall(r"^EXPOSE (.*)$", (DEPLOY / "container/Containerfile").read_text(), re.MULTILINE)
    assert exposed.split() == [str(clients), str(web), health]


def test_the_manifest_of_the_pipeline_names_what_it_defines():
    documents = {
        document["kind"]: document
        for document in yaml.safe_load_all((DEPLOY / "kubernetes/pipeline.yaml").read_text())
    }
    assert set(documents) == {"ServiceAccount", "Role", "RoleBinding", "StatefulSet", "Service"}
    assert {document["metadata"]["namespace"] for document in documents.values()} == {"muster"}
    drivers, service = documents["StatefulSet"]["spec"], documents["Service"]["spec"]
    pod = drivers["template"]["spec"]
    assert drivers["replicas"] == 2
    assert service["selector"] == drivers["template"]["metadata"]["labels"]
    assert pod["serviceAccountName"] == documents["ServiceAccount"]["metadata"]["name"]
    (container,) = pod["containers"]
    assert container["command"][:3] == ["muster", "run", "pipeline"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_the_manifest_of_the_pipeline_fits_the_schema_of_kubernetes():
    """With a validator that contains the schemas; installed once, in an environment of its own."""
    folder = Path.home() / ".cache" / "muster" / "kubernetes-validate"
    python = folder / "bin" / "python"
    if not (folder / "done").exists():
        await asyncio.to_thread(venv.create, folder, with_pip=True)
        code, text = await java_project.output(
            str(python), "-m", "pip", "install", "-q", "kubernetes-validate==1.37.0", cwd=folder
        )
        require_part("kubernetes-validate", not code, hint=text[-300:])
        (folder / "done").touch()
    manifest = DEPLOY / "kubernetes/pipeline.yaml"
    code, text = await java_project.output(
        str(python), "-m", "kubernetes_validate", "--strict", str(manifest), cwd=folder
    )
    assert code == 0, text
    broken = manifest.read_text().replace("replicas: 2", "replicas: two")
    (folder / "broken.yaml").write_text(broken)
    code, text = await java_project.output(
        str(python), "-m", "kubernetes_validate", "--strict", "broken.yaml", cwd=folder
    )
    assert code != 0


def test_a_unit_starts_the_program_however_it_was_called(tmp_path: Path):
    """`python -m muster` is called by the path of a module."""
    answer = driver.run("systemd", home=tmp_path)
    assert f"\nExecStart={program.current()} up\n" in answer.out

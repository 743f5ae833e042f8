"""The fast tier (``pytest --fast``, ``make test-fast``): tests to run on every save.

It leaves out what takes long to start or to run: Spark, a browser, Java, clusters of brokers,
whole domains in processes of their own, random models, and tests that are given more than the usual time. The
lists below name them; every other test belongs to the fast tier, also a new one. Random tests try fewer
examples. ``make test`` runs all.
"""

from __future__ import annotations

import fnmatch
import functools
from pathlib import Path

import hypothesis
import pytest

#: Fixtures that start something large.
FIXTURES = {
    "spark": "Spark",
    "lab": "a domain with a web server",
    "browser": "a browser",
    "chromium": "a browser",
    "made": "a domain",
    "cluster": "three brokers",
    "start_process": "processes that are killed",
    "running": "a domain",
    "up": "a domain",
    "gateway": "an AMQP gateway",
    "wsman": "a fleet with a SOAP gateway",
    "small_disk": "a mounted disk",
}
#: Patterns of files, with the reason.
FILES = {
    "tests/pipeline/test_killed.py": "Spark in a process of its own",
    "tests/pipeline/test_cluster.py": "Spark in a process of its own",
    "tests/pipeline/test_java.py": "Java",
    "tests/web/*": "a domain with a web server",
    "tests/loop/*": "a whole domain and Spark",
    "tests/client/*": "whole domains",
    "tests/app/test_[abdemntv]*.py": "whole domains",
    "tests/app/test_checkup.py": "whole domains",
    "tests/app/test_otlp_export.py": "whole domains",
    "tests/app/test_re*.py": "whole domains",
    "tests/app/test_settings.py": "reads the whole tree",
    "tests/app/test_soap_*.py": "whole domains",
    "tests/app/test_syslog.py": "whole domains",
    "tests/cli/test_activity.py": "whole domains",
    "tests/cli/test_creds.py": "whole domains",
    "tests/cli/test_demo.py": "a history of weeks",
    "tests/cli/test_extras.py": "processes",
    "tests/cli/test_flows.py": "whole domains",
    "tests/cli/test_gateway.py": "processes",
    "tests/cli/test_interrupts.py": "processes",
    "tests/cli/test_running_sweep.py": "whole domains",
    "tests/cli/test_sweep.py": "many command lines",
    "tests/*/test_cli.py": "processes",
    "tests/docs/test_blocks.py": "whole domains",
    "tests/docs/test_wheel.py": "builds a wheel",
    "tests/docs/test_mutants.py": "mutation tests",
    "tests/benchmarks/*": "benchmarks",
    "tests/deploy/*": "processes",
    "tests/testing/test_plugin.py": "runs pytest",
    "tests/testing/test_repeat.py": "runs pytest",
    "tests/gateways/*/test_clients.py": "clients in processes of their own",
    "tests/gateways/amqp/test_faults.py": "long scenarios",
    "tests/gateways/amqp/test_java*.py": "Java",
    "tests/gateways/amqp/test_roles.py": "many logins",
    "tests/gateways/amqp/test_sasl.py": "slow password hashes",
    "tests/gateways/uddi/test_endpoints.py": "slow password hashes",
    "tests/gateways/uddi/test_hostile.py": "slow password hashes",
    "tests/gateways/wscontext/test_handler.py": "long scenarios",
    "tests/gateways/wsman/test_representations.py": "random models",
    "tests/manage/test_adapters.py": "processes",
    "tests/manage/test_direct.py": "long scenarios",
    "tests/manage/test_drills.py": "processes",
    "tests/manage/test_fleet.py": "long scenarios",
    "tests/manage/test_agent_process.py": "processes",
    "tests/manage/test_processes.py": "processes",
    "tests/manage/test_sizes.py": "large messages",
    "tests/manage/test_spark*.py": "Spark",
    "tests/bus/test_broker_*.py": "networks of brokers",
    "tests/bus/test_faults.py": "networks of brokers",
    "tests/bus/test_leases.py": "waits for leases to expire",
    "tests/bus/test_simulated_leases.py": "random models",
    "tests/docs/test_tidiness.py": "reads the whole tree",
    "tests/inform/test_demand_experiment.py": "long scenarios",
    "tests/inform/test_nodes.py": "many nodes",
    "tests/inform/test_views.py": "many nodes",
    "tests/manage/test_faults.py": "long scenarios",
    "tests/manage/test_topologies.py": "networks of brokers",
    "tests/manage/test_ways.py": "proxies and TLS",
    "tests/message/test_deep_queues.py": "deep queues",
    "tests/message/test_flow.py": "long scenarios",
    "tests/message/test_partitions.py": "long scenarios",
    "tests/message/test_sizes.py": "large messages",
    "tests/monitor/test_client.py": "long scenarios",
    "tests/monitor/test_domain.py": "whole domains",
    "tests/monitor/test_sensor.py": "long scenarios",
    "tests/monitor/test_channel_loss.py": "long scenarios",
    "tests/notify/test_durable.py": "long scenarios",
    "tests/notify/test_engine.py": "large tables of receivers",
    "tests/notify/test_grants.py": "several notifiers",
    "tests/notify/test_scopes.py": "several notifiers",
    "tests/notify/test_service.py": "several notifiers",
    "tests/notify/test_shards.py": "several notifiers",
    "tests/notify/test_worm.py": "long scenarios",
    "tests/pipeline/test_*history*.py": "Delta tables",
    "tests/pipeline/test_latest.py": "Delta tables",
    "tests/pipeline/test_requests.py": "thousands of alerts",
    "tests/pipeline/test_shard_changes.py": "random models",
    "tests/pipeline/test_sql.py": "Delta tables",
    "tests/pipeline/test_storage.py": "an object store",
    "tests/predicates/test_hostile.py": "random texts",
    "tests/supervision/test_everywhere.py": "whole domains",
    "tests/trust/test_logins.py": "slow password hashes",
    "tests/trust/test_passwords.py": "slow password hashes",
    "tests/trust/test_permission_matrix.py": "a broker for each role",
    "tests/inform/test_domain.py": "whole domains",
    "tests/*/test_*model*.py": "random models",
    "tests/sim/test_seeds.py": "a simulated domain",
    "tests/*/test_agreement.py": "random models",
}
EXAMPLES = 25  # of a random test; Hypothesis tries 100 otherwise


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="only the fast tier (tests/tiers.py)")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--fast"):
        current = hypothesis.settings.get_current_profile_name()
        hypothesis.settings.register_profile(
            "fast", hypothesis.settings.get_profile(current), max_examples=EXAMPLES
        )
        hypothesis.settings.load_profile("fast")


@functools.cache
def is_left_out(file: str) -> bool:
    """Whether a whole file is outside of the tier."""
    return any(fnmatch.fnmatchcase(file, pattern) for pattern in FILES)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files outside the tier are not imported: that takes longer than many tests."""
    if not config.getoption("--fast") or collection_path.suffix != ".py":
        return None
    file = collection_path.relative_to(config.rootpath).as_posix()
    return True if is_left_out(file) else None


def why_not_fast(item: pytest.Item) -> str:
    """Why a test does not belong to the fast tier; empty if it does."""
    for name in getattr(item, "fixturenames", ()):
        if name in FIXTURES:
            return FIXTURES[name]
    return "more than the usual time" if item.get_closest_marker("timeout") is not None else ""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--fast"):
        return
    left_out = [item for item in items if why_not_fast(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not why_not_fast(item)]

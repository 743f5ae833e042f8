"""The section ``manage`` of a domain's settings."""

from __future__ import annotations

from typing import Annotated

from muster.core.settings import sections

doc = sections.field_doc

LOCAL = "local"  # this machine's agent, if it is the only one


class ManageSettings(sections.SettingsSection, frozen=True, kw_only=True):
    """Management: registry endpoints, managers and this machine's agent, each in its own process."""

    enabled: Annotated[bool, doc("Whether this domain manages resources.")] = True
    registries: Annotated[
        int,
        doc("Registry endpoints: one is active, the others are on standby. Two survive a crash.", ge=0, le=5),
    ] = 2
    managers: Annotated[
        int,
        doc(
            "Least number of manager processes. Each gets an even share of the resources; with a single "
            "one, a crash interrupts management until it is restarted. While they need more than 60 % of a "
            "core each, more are started, up to the number of cores.",
            ge=0,
            le=64,
        ),
    ] = 2
    agent: Annotated[bool, doc("Whether this machine hosts resources.")] = True
    agent_name: Annotated[
        str,
        doc(
            "The identity of this machine's agent, used in manifests. If several machines run one domain, "
            "each has its own, and its registries, managers, notifier and information nodes are named "
            "after it (`manager-NAME-1`)."
        ),
    ] = LOCAL
    direct_ports: Annotated[
        tuple[int, ...],
        doc(
            "Ports on which managers accept direct connections of agents, one for each manager (0: a free "
            "port, also for further managers), on `bus.host`. Agents that cannot connect to them, for "
            "instance because of a firewall, use the brokers. Empty: all use the brokers."
        ),
    ] = (0,)
    manager_ttl_s: Annotated[
        float,
        doc(
            "A manager that has not renewed for this long expires. A broker's report that its connection "
            "closed takes effect at once, so this matters only if a process is frozen, or a complete machine "
            "or network is lost. Managers renew every TTL / 3, and do not expire while the registry itself "
            "cannot act.",
            ge=1,
            le=600,
        ),
    ] = 6.0
    beat_s: Annotated[
        float,
        doc(
            "Interval between heartbeats of this machine's resources. Silence is detected after 2.5 of them.",
            gt=0,
            le=3600,
        ),
    ] = 5.0

    @property
    def machine_suffix(self) -> str:
        """Distinguishes the identities of processes of different machines: two processes with one name would
        act for each other."""
        return "" if self.agent_name == LOCAL else f"-{self.agent_name}"

"""The section ``manage`` of a domain's settings."""

from __future__ import annotations

from typing import Annotated

from muster.core.settings import sections

doc = sections.field_doc

LOCAL = "local"  # this machine's agent, where it is the only one


class ManageSettings(sections.SettingsSection, frozen=True, kw_only=True):
    """Management: registry endpoints, managers and this machine's agent, each a process of its own."""

    enabled: Annotated[bool, doc("Whether this domain manages resources.")] = True
    registries: Annotated[
        int, doc("Registry endpoints: one acts, the others are ready to. Two survive a crash.", ge=1, le=5)
    ] = 2
    managers: Annotated[
        int,
        doc(
            "Manager processes. Each takes an even share of the resources; with one alone, a crash stops "
            "management until it is started again.",
            ge=1,
            le=64,
        ),
    ] = 2
    agent: Annotated[bool, doc("Whether this machine hosts resources too.")] = True
    agent_name: Annotated[
        str,
        doc(
            "The identity of this machine's agent, which manifests name. Where several machines run one "
            "domain each has its own, and its registries and managers are named after it (`manager-NAME-1`)."
        ),
    ] = LOCAL
    children: Annotated[
        tuple[str, ...],
        doc(
            "Homes of domains below this one in the bootstrap tree: their processes are started with this "
            "one's, and again when they fall or are silent."
        ),
    ] = ()
    parent: Annotated[
        str,
        doc(
            "HOST:PORT of the bootstrap node above, which gives it to the children it starts. None: the top."
        ),
    ] = ""
    known_as: Annotated[str, doc("The name under which the node above knows this one.")] = ""
    direct_ports: Annotated[
        tuple[int, ...],
        doc(
            "Ports at which managers take direct connections of agents that need no broker, one for each "
            "manager (0: a free one). None: agents come by way of brokers."
        ),
    ] = ()
    manager_ttl_s: Annotated[
        float,
        doc(
            "A manager that has not renewed for so long is expired. A broker's word that its connection "
            "closed is believed at once, so this counts only where a whole machine or network is lost.",
            ge=1,
            le=600,
        ),
    ] = 15.0
    beat_s: Annotated[
        float,
        doc(
            "Between two heartbeats of this machine's resources. Silence is noticed after two and a half.",
            gt=0,
            le=3600,
        ),
    ] = 5.0

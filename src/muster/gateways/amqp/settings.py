"""The section ``[amqp]`` of a domain's settings."""

from __future__ import annotations

from typing import Annotated

from muster.core import errors
from muster.core.net import hosts
from muster.core.settings import sections

doc = sections.field_doc


class AmqpSettings(sections.SettingsSection, frozen=True, kw_only=True):
    """The gateway for AMQP 1.0 clients, such as JMS ones, in processes of its own. Clients log in with the
    passwords of `muster gateway password` and act on the bus with their own identity.
    """

    enabled: Annotated[bool, doc("Serve AMQP with the domain. Needs the extra `amqp`.")] = False
    host: Annotated[
        str, doc("Address to listen on; without a certificate, it must be a loopback address.")
    ] = "127.0.0.1"
    port: Annotated[hosts.Port, doc("Port; 0: any free port. AMQP with TLS usually uses 5671.")] = 5672
    certificate: Annotated[
        sections.FilePath, doc("Certificate (PEM): clients then connect with TLS, at amqps://.")
    ] = ""
    key: Annotated[sections.FilePath, doc("The certificate's private key (PEM).")] = ""
    processes: Annotated[
        int,
        doc(
            "Number of processes that serve the port; the kernel distributes the clients among them. 0: one "
            "for each core, or one with `share_port`.",
            ge=0,
            le=1024,
        ),
    ] = 0
    share_port: Annotated[bool, doc("Share the port with other gateways that have this setting.")] = False
    anonymous: Annotated[str, doc("Identity of clients that log in anonymously. Empty: they may not.")] = ""
    connections_per_address: Annotated[
        int,
        doc(
            "Maximum number of connections of a client address, for each process. 0: unlimited, for clients "
            "behind a proxy.",
            ge=0,
        ),
    ] = 1000

    def __post_init__(self) -> None:
        if self.key and not self.certificate:
            raise errors.InvalidInput("amqp.key needs amqp.certificate")

    def process_count(self, cores: int) -> int:
        return self.processes or (1 if self.share_port else cores)

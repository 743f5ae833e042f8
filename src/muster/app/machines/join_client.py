"""Joining a domain: from a token to a home that `muster up` can start.

All private keys are made here. What is needed to repeat the request after a crash is stored before it is
sent, because the token is bound to the first request.
"""

from __future__ import annotations

import asyncio
import pathlib
import shutil
import socket
from collections.abc import Callable

import msgspec

from muster.app import certificates, enrolment, home
from muster.app.components import bootstrap_client
from muster.app.machines import admission, membership, roles
from muster.app.operations import listen_ports
from muster.core import errors, files
from muster.core.formats import toml
from muster.core.net import hosts
from muster.core.settings import domain
from muster.trust import certificates as certificates_
from muster.trust import machine_keys, nkeys, sealed_box

DRAFT = "joining"  # what a request that was sent needs
_HEAD = "# Settings of this machine of a domain, written by `muster join`.\n"


class JoinChoices(msgspec.Struct, frozen=True, kw_only=True):
    """What the user chose. ``address``: under which the others reach this machine. ``listen``: where its
    broker listens."""

    name: str
    address: str
    listen: str
    zone: str
    port: int = admission.PORT
    route_port: int = admission.ROUTE_PORT


class _Draft(msgspec.Struct, frozen=True):
    """The secret halves of the keys in a request, by identity."""

    seeds: dict[str, str]


async def join(
    place: home.Home,
    token: enrolment.EnrolmentToken,
    choices: JoinChoices,
    *,
    waiting: Callable[[str], None],
    proxy: str | None = None,
) -> membership.Machine:
    """Create the home. ``waiting`` is called with each reason of a delay."""
    if proxy and roles.MachineRole.BROKER in roles.check(token.roles):
        raise errors.Refused(
            "a machine behind a proxy cannot run a broker: the others could not reach it",
            hint="`muster machine token --roles agent`, with --address for a broker that the proxy reaches",
        )
    if roles.MachineRole.BROKER in token.roles:
        await asyncio.to_thread(_check_listens, choices)
    parts = membership.parts(membership.check_name(choices.name), token.roles, choices.zone)
    draft = place.root / DRAFT
    keys = await asyncio.to_thread(_keys, draft, list(parts))
    box = await asyncio.to_thread(sealed_box.SealedBoxKey.kept_in, draft / "box.key")
    certificate_key = certificates_.CertificateKey()
    request = admission.JoinRequest(
        name=choices.name,
        address=choices.address,
        zone=choices.zone,
        keys={identity: key.public for identity, key in keys.items()},
        box=box.public,
        certificate_key=certificate_key.public,
        port=choices.port,
        route_port=choices.route_port,
    )
    fixed = token.chosen or bool(proxy)
    answer = await bootstrap_client.redeem(
        token, keys["bootstrap"].public, join=request, proxy=proxy, waiting=waiting
    )
    if answer.joined is None:
        raise errors.Refused("the domain's version of Muster admits no machines this way")
    joined = answer.joined

    def write() -> membership.Machine:
        here = joined.machines.here
        values = membership.settings(
            here,
            domain=joined.domain,
            zone=choices.zone,
            servers=token.servers if fixed else joined.machines.remote_urls,
            listen=choices.listen,
            certificate=f"{joined.domain}/certs/{certificates.NAME}.pem",
        )
        if fixed and not here.broker:
            values |= {"bus.follow_machines": False, **({"bus.proxy": proxy} if proxy else {})}
        settings = domain.DomainSettings(name=joined.domain, data_dir=str(place.root))
        keyring_folder = settings.folder / domain.TrustSettings().keys_dir
        trust = machine_keys.adopt(keyring_folder, joined.domain, joined.documents)
        for identity, role in parts.items():
            machine_keys.store_own(trust, identity, role, joined.users[identity], keys[identity])
        if joined.secrets:
            machine_keys.open_secrets(trust, joined.secrets, box, choices.name)
        held = certificates_.CertificateStore(settings.folder / "certs", joined.domain)
        held.adopt_bundle(joined.bundle)
        if joined.certificate:
            held.adopt(certificates.NAME, certificate_key, joined.certificate)
        membership.store(settings.folder, joined.machines)
        place.stamp()
        # Last: this file makes the folder a home, so an interrupted command can be repeated.
        files.write(place.settings_file, (_HEAD + toml.sections(values)).encode(), mode=files.PUBLIC)
        shutil.rmtree(draft)
        return here

    return await asyncio.to_thread(write)


def _check_listens(choices: JoinChoices) -> None:
    """Before the domain knows the machine: its broker will have this address. Blocks."""
    try:
        socket.getaddrinfo(choices.address, choices.port)
    except (OSError, UnicodeError) as error:
        raise errors.InvalidInput(
            f"{choices.address!r} does not resolve: {error}", hint="name another --address"
        ) from error
    for port in (choices.port, choices.route_port):
        if not listen_ports.is_free(choices.listen, port):
            raise errors.Unavailable(
                f"a broker cannot listen on {choices.listen}, port {port}: it is in use, or the address is "
                "not of this machine",
                hint="choose with --listen, --port and --route-port",
            )


def _keys(draft: pathlib.Path, names: list[str]) -> dict[str, nkeys.KeyPair]:
    """The keys of a former request, or new ones. Blocks."""
    draft.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = draft / "keys.json"
    try:
        seeds = msgspec.json.decode(path.read_bytes(), type=_Draft).seeds
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        seeds = {}
    if set(seeds) != set(names):
        # The token is bound to one of them, also if the machine got another name after a refusal.
        seeds = {name: seeds.get(name) or nkeys.KeyPair.create(nkeys.KeyKind.USER).seed for name in names}
        draft.mkdir(mode=0o700, parents=True, exist_ok=True)
        files.write(path, msgspec.json.encode(_Draft(seeds)))
    return {name: nkeys.KeyPair.from_seed(seed) for name, seed in seeds.items()}


def own_address(servers: tuple[str, ...]) -> str:
    """The address of this machine on the way to the domain. Blocks."""
    for url in servers:
        host, port = hosts.host_of_url(url, "server")
        try:
            candidates = socket.getaddrinfo(host, port or 4222, type=socket.SOCK_DGRAM)
            family, kind, _, _, address = candidates[0]
            with socket.socket(family, kind) as towards:
                towards.connect(address)  # sends nothing: only selects the route
                return str(towards.getsockname()[0])
        except (OSError, UnicodeError):
            continue
    raise errors.Unavailable(
        f"no route to {', '.join(servers)}",
        hint="create a token with an --address that this machine reaches",
    )

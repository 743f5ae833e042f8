"""Joining a domain: from a token to a home that `muster up` can start.

All private keys are made here. What is needed to repeat the request after a crash is stored before it is
sent, because the token is bound to the first request.
"""

from __future__ import annotations

import asyncio
import pathlib
import shutil
import socket
import ssl
from collections.abc import Callable

import msgspec

from muster import connection
from muster.app import certificates, enrolment, home
from muster.app.components import bootstrap_client
from muster.app.machines import admission, membership, roles
from muster.app.supervisor import worker
from muster.core import errors, files
from muster.core.formats import toml
from muster.core.net import hosts
from muster.core.settings import domain
from muster.trust import certificates as certificates_
from muster.trust import credentials, machine_keys, nkeys, sealed_box

RETRY_S = 2.0
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
    """Create the home. ``waiting`` is called with the reason of a delay."""
    if proxy and roles.MachineRole.BROKER in roles.check(token.roles):
        raise errors.Refused(
            "a machine behind a proxy cannot run a broker: the others could not reach it",
            hint="`muster machine token --roles agent`, with --address for a broker that the proxy reaches",
        )
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
    joined = await _request(token, keys["bootstrap"], request, waiting, proxy)

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


def _keys(draft: pathlib.Path, names: list[str]) -> dict[str, nkeys.KeyPair]:
    """The keys of a former request, or new ones. Blocks."""
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


async def _request(
    token: enrolment.EnrolmentToken,
    key: nkeys.KeyPair,
    request: admission.JoinRequest,
    waiting: Callable[[str], None],
    proxy: str | None,
) -> admission.JoinedMachine:
    tls = ssl.create_default_context(cadata=token.ca) if token.ca else None
    machine = await asyncio.to_thread(worker.machine_id)
    creds = credentials.Credentials.parse(token.creds)
    try:
        async with await connection.connect(token.servers, creds=creds, tls=tls, proxy=proxy) as bus:
            while True:
                try:
                    client = bootstrap_client.BootstrapClient(bus)
                    answer = await client.enrol(key.public, machine=machine, join=request)
                except errors.Unavailable as error:
                    # The outcome may be unknown: repeating the request with the same keys is safe.
                    if token.has_expired:
                        raise
                    waiting(f"{error.message}; {error.hint or 'retrying'}")
                    await asyncio.sleep(RETRY_S)
                else:
                    if answer.joined is None:
                        raise errors.Refused("the domain's version of Muster admits no machines this way")
                    return answer.joined
    except (errors.Unauthorized, errors.Unavailable) as error:
        if token.has_expired:
            raise errors.Forbidden(
                "this token has expired", hint="create another one: `muster machine token`"
            ) from error
        raise


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
        except OSError:
            continue
    raise errors.Unavailable("no route to the domain's brokers", hint="name this machine's --address")

"""Connects to processes that accept direct connections, and keeps the connections.

The client proves who it is only to a peer that has proven itself: by the key that it announced over the bus,
for the address that was dialled. An attempt that fails, because a firewall drops or refuses it or because
another process has the address, is made again after a pause that grows; messages use the broker until then.
"""

from __future__ import annotations

import asyncio
import secrets

from muster.bus.client import credential_source
from muster.bus.direct import bus as direct_bus
from muster.bus.direct import frames, link
from muster.core import errors, lifecycle, subjects
from muster.core.net import hosts
from muster.core.telemetry import log
from muster.supervision import tasks

events = log.EventLog("direct")

PAUSE_S, PAUSE_S_MAX = 0.5, 60.0
PEERS_MAX = 256
ADDRESSES_MAX = 16  # of one peer


class DirectDialer(lifecycle.ClosingContext):
    """The links of ``bus`` that this process opens. What peers send on them may only be addressed to it."""

    def __init__(self, bus: direct_bus.DirectBus, access: credential_source.PeerAccess) -> None:
        self._bus = bus
        self._access = access
        self._kept: dict[str, frames.PeerAddress] = {}  # by identity, or by address
        own = subjects.to_identity("*", bus.identity, ">")
        self._may_send = subjects.SubjectPatternSet((own,)).match
        self._tasks = tasks.TaskSupervisor(f"direct connections of {bus.identity}")

    async def close(self) -> None:
        self.cancel()
        await self._tasks.close()

    def cancel(self) -> None:
        """As `close`, without waiting."""
        self._tasks.cancel()

    def keep(self, peer: frames.PeerAddress) -> None:
        """Have a link to the peer, and later to the address that it announces then."""
        name = peer.identity or peer.addresses[0]
        is_new = name not in self._kept
        if is_new and len(self._kept) >= PEERS_MAX:
            return
        self._kept[name] = peer
        if is_new:
            self._tasks.loop(f"peer {name}", lambda: self._keep(name))

    async def _keep(self, name: str) -> None:
        pause_s = PAUSE_S
        while True:
            peer = self._kept[name]
            try:
                await self.use(peer)
                pause_s = PAUSE_S
            except errors.MusterError:
                pause_s = min(PAUSE_S_MAX, 2 * pause_s) if self._kept[name] is peer else PAUSE_S
            await asyncio.sleep(pause_s)

    async def use(self, peer: frames.PeerAddress) -> None:
        """Have a link to the peer until it ends. Raises `core.errors` if there is none."""
        try:
            made = await self._connect(peer)
        except errors.MusterError as error:
            direct_bus.count_fallback("unreachable" if isinstance(error, errors.Unavailable) else "proof")
            events.info("link-unavailable", peer=peer.identity or peer.addresses[0], error=error)
            raise
        remove = self._bus.add(made)
        try:
            await asyncio.wait((made.ended,))
        finally:
            remove()
            made.close()

    async def _connect(self, peer: frames.PeerAddress) -> link.DirectLink:
        failure: errors.MusterError = errors.InvalidInput(f"{peer.identity} announces no address")
        for address in peer.addresses[:ADDRESSES_MAX]:
            try:
                return await self._connect_to(address, peer)
            except errors.MusterError as error:
                failure = error
            except (OSError, TimeoutError, ValueError) as error:
                failure = errors.NotConnected(f"{address}: {error or 'it does not respond in time'}")
        raise failure

    async def _connect_to(self, address: str, peer: frames.PeerAddress) -> link.DirectLink:
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        if not peer.tls and not hosts.is_loopback(host):
            raise errors.Refused(f"{address} has no TLS, which is for loopback only")
        creds = await asyncio.to_thread(self._access.creds)  # again: they may have been renewed
        loop = asyncio.get_running_loop()
        made = link.DirectLink(self._bus.deliver, payload_bytes_max=self._bus.payload_bytes_max)
        try:
            async with asyncio.timeout(frames.HANDSHAKE_S):
                await loop.create_connection(
                    lambda: made, host, int(port), ssl=(self._access.tls or True) if peer.tls else None
                )
                nonce = secrets.token_urlsafe(16)
                made.greet(frames.DirectHello(nonce))
                challenge = await made.greeting(frames.DirectChallenge)
                _check(challenge, address, peer, nonce, creds)
                made.open(challenge.identity, self._bus.identity)
                made.may_send = self._may_send
                signed = frames.signed_by_client(challenge.nonce, challenge.identity)
                made.greet(frames.DirectProof(creds.user_jwt, creds.answer(signed)))
                await made.welcomed
        except BaseException:
            made.close()
            raise
        return made


def _check(
    challenge: frames.DirectChallenge,
    address: str,
    peer: frames.PeerAddress,
    nonce: str,
    creds: credential_source.CredentialSource,
) -> None:
    """Whether it is the peer, and the process at this address itself."""
    subjects.identity(challenge.identity)
    if not peer.key:
        return
    if challenge.identity != peer.identity or address not in challenge.addresses:
        raise errors.Unauthorized(f"{address} is not {peer.identity}, but {challenge.identity}")
    creds.check_answer(peer.key, frames.signed_by_listener(nonce, challenge.addresses), challenge.answer)


def configured(address: str, *, tls: bool) -> frames.PeerAddress:
    """An address that a user configured."""
    if not address.rpartition(":")[2].isdecimal():
        raise errors.InvalidInput(f"{address[:200]!r} is not the address of a process: expected HOST:PORT")
    return frames.PeerAddress(addresses=(address,), tls=tls)

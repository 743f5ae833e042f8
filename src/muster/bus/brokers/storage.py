"""Placement of durable storage: queried from the brokers that share it, and changed at run time.

The brokers of a cluster, or of a super-cluster, that have storage form one group with a leader. The leader
places streams on members and moves them; requests on the system account make it evacuate a member and remove
it.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from muster.bus.brokers import broker, system_account
from muster.bus.streams import integrity
from muster.core import errors

ELECTION_TIMEOUT_S = 30.0
REPLICA_DRAIN_S = 5.0
REPLICA_TIMEOUT_S = 600.0  # for the transfer of one stream
TWO_OR_MORE = "in a cluster two brokers or more must have storage, and three if one may fail; or none"


async def replicas_max(member: broker.Broker) -> int:
    """The highest number of replicas of a stream on this broker; 0 if there are none."""
    page = await member.monitoring_page("jsz?accounts=true&streams=true&config=true")
    return max(
        (
            int((stream.get("config") or {}).get("num_replicas", 1))
            for account in page.get("account_details") or ()
            for stream in account.get("stream_detail") or ()
        ),
        default=0,
    )


async def evacuate(
    member: broker.Broker,
    others: Sequence[broker.Broker],
    access: system_account.SystemAccess,
    timeout_s: float,
) -> None:
    """Have everything that this broker stores moved to the others, and wait until it is."""
    assert member.binary is not None
    member.binary.require("storage evacuation")
    addresses = [other.address for other in others]
    await system_account.request(addresses, access, "$JS.API.SERVER.EVACUATE", {"peer": member.name})

    async def empty() -> bool:
        return int((await member.monitoring_page("jsz"))["streams"]) == 0

    try:
        await broker.poll_until(empty, timeout_s=timeout_s)
    except TimeoutError:
        raise errors.TimedOut(
            f"broker {member.name} still held streams after {timeout_s:g} s",
            hint="the evacuation continues: try again later",
        ) from None


async def remove_peer(
    name: str, others: Sequence[broker.Broker], access: system_account.SystemAccess
) -> None:
    """Strike a broker that stores no more from the group that the others form.

    If it was the leader they elect another first, which takes some seconds without a reply.
    """
    addresses = [other.address for other in others]

    async def struck() -> bool:
        try:
            await system_account.request(addresses, access, "$JS.API.SERVER.REMOVE", {"peer": name})
        except errors.Unavailable:
            return False
        return True

    try:
        await broker.poll_until(struck, timeout_s=ELECTION_TIMEOUT_S)
    except TimeoutError:
        raise errors.TimedOut(
            f"broker {name} is still a member of the storage group: the others have no leader",
            hint="see that more than half of the brokers that ever shared it run, and try again",
        ) from None
    await wait_until_settled(others, ELECTION_TIMEOUT_S)


@dataclass(frozen=True, slots=True)
class StorageGroup:
    """The brokers that share a storage, as its leader knows them, and those that it is connected to."""

    members: frozenset[str] = frozenset()
    current: frozenset[str] = frozenset()


async def group_of(addresses: Sequence[str], access: system_account.SystemAccess) -> StorageGroup:
    """Without members while there is no leader."""
    answers = await system_account.gather(
        addresses, access, "$SYS.REQ.SERVER.PING.JSZ", enough=1, payload=b'{"leader_only": true}'
    )
    for answer in answers:
        group = (answer.get("data") or {}).get("meta_cluster") or {}
        if leader := group.get("leader"):
            peers = group.get("replicas") or ()
            return StorageGroup(
                frozenset({leader, *(peer["name"] for peer in peers)}),
                frozenset({leader, *(peer["name"] for peer in peers if peer.get("current"))}),
            )
    return StorageGroup()


async def recreate_replica(
    member: broker.Broker, account: str, stream: str, placed: integrity.StreamReplicas
) -> None:
    """Delete a broker's replica of a stream while the broker is stopped, and wait until it has received the
    stream from the leader again. Its part of the consensus is deleted too, so that it cannot become the
    leader before."""
    store = member.config.store_path
    assert store is not None

    def delete() -> None:
        for folder in (
            *(store / "jetstream" / account / "streams").glob(stream),
            *(store / "jetstream").glob(f"*/_js_/{placed.raft_group}"),
        ):
            shutil.rmtree(folder)

    await member.restart(drain_s=REPLICA_DRAIN_S, between=delete)

    async def complete() -> bool:
        page = await member.monitoring_page("jsz?accounts=true&streams=true")
        return any(
            detail["name"] == stream and detail["state"]["last_seq"] >= placed.last_sequence
            for of_account in page.get("account_details") or ()
            if of_account["name"] == account or of_account.get("id") == account
            for detail in of_account.get("stream_detail") or ()
        )

    await broker.poll_until(complete, timeout_s=REPLICA_TIMEOUT_S)


async def wait_until_settled(sharing: Sequence[broker.Broker], timeout_s: float) -> None:
    """Wait until exactly these brokers share a storage whose leader is connected to all of them."""
    names = {member.name for member in sharing}

    async def together() -> bool:
        for member in sharing:
            group = (await member.monitoring_page("jsz")).get("meta_cluster") or {}
            if group.get("leader") == member.name:
                current = {peer["name"] for peer in group.get("replicas") or () if peer.get("current")}
                return group.get("cluster_size") == len(names) and current == names - {member.name}
        return False

    if len(names) > 1:
        try:
            await broker.poll_until(together, timeout_s=timeout_s)
        except TimeoutError:
            raise errors.TimedOut(
                f"the storage of {', '.join(sorted(names))} has not settled after {timeout_s:g} s",
                hint="see that all of them run and reach each other",
            ) from None

"""``muster authority``: grant and revoke restricted attributes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from muster.cli import command, connection, leaf
from muster.cli.domain import config
from muster.notify import operations

if TYPE_CHECKING:
    from muster.trust import grants

by_option = click.option(
    "--by",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File of an authority (see `appoint`); default: the root authority of the domain.",
)


@click.group(
    cls=command.MusterGroup,
    examples=[("muster authority grant controller-nw _command_region=northwest _trust_level=4", "")],
)
def authority() -> None:
    """Grant and revoke restricted attributes."""


def signer(invocation: command.Invocation, by: Path | None) -> grants.Authority:
    import msgspec

    from muster.app import identities
    from muster.core import errors
    from muster.trust import grants, nkeys

    if by is None:
        return identities.open_keyring(config.load(invocation)).root_authority()
    try:
        kept = msgspec.json.decode(by.read_bytes(), type=dict[str, Any])
        return grants.Authority(nkeys.KeyPair.from_seed(kept["seed"]), tuple(kept["mandates"]))
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, TypeError, RecursionError) as error:
        raise errors.InvalidInput(f"{by} is not the file of an authority: {error}") from None


@authority.command(
    acts=("grant", "{holder}: {attributes}"),
    examples=[("muster authority grant controller-nw _trust_level=4 --tier 2 --lifetime 30d", "")],
)
@click.argument("holder")
@click.argument("attributes", nargs=-1, required=True, metavar="NAME=VALUE...")
@click.option(
    "--tier", type=command.CountParam(1, 99), default=1, show_default=True, help="Tier of the grant."
)
@command.duration("--lifetime", "30d", "Lifetime; at most trust.grant_lifetime_s.")
@click.option(
    "--participant",
    "prefix",
    metavar="NAME",
    default="",
    help="Only for this sender name of the holder, or names below it.",
)
@click.option(
    "--region",
    metavar="REGION",
    default="",
    help="Only for receivers whose state has this region, or one below it.",
)
@click.option(
    "--audience", multiple=True, metavar="PROCESS[/NAME]", help="Only for these receivers; may be repeated."
)
@by_option
@connection.options
@command.pass_invocation
def grant(
    invocation: command.Invocation,
    holder: str,
    attributes: tuple[str, ...],
    tier: int,
    lifetime_s: float,
    prefix: str,
    region: str,
    audience: tuple[str, ...],
    by: Path | None,
    to: connection.ConnectionOptions,
) -> None:
    """Grant restricted attributes to the identity HOLDER.

    The names of restricted attributes begin with an underscore.
    """
    import time

    from muster.cli.notifications import notify
    from muster.core import errors
    from muster.notify import models, protocol
    from muster.trust import documents

    values: Any = protocol.to_wire(notify.values_of(attributes))
    for name in values:
        if not models.restricted(name):
            raise errors.InvalidInput(
                f"{name[:80]!r} is not restricted and needs no grant",
                hint="names of restricted attributes begin with an underscore",
            )
        models.require_finite(name, (values[name],))
    issuer = signer(invocation, by)
    narrowed = prefix or region or audience
    scope = documents.GrantScope(prefix=prefix, region=region, audience=audience) if narrowed else None
    chain = issuer.grant(holder, values, tier=tier, now=time.time(), lifetime_s=lifetime_s, scope=scope)

    async def work() -> None:
        from muster.notify import client

        async with await connection.connect(invocation, to) as bus, client.NotifyClient(bus) as mine:
            await mine.present(chain)

    command.run(work())
    serial = documents.serial_of(chain[0])
    facts = {"serial": serial, "holder": holder, "attributes": values, "tier": tier}
    invocation.printer.item(facts, f"granted to {holder}: {' '.join(attributes)} (serial {serial})")


class SerialParam(command.MusterCommand):
    """A serial number may begin with a hyphen; it is not an option then."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        from muster.trust import documents

        options = {name for option in self.get_params(ctx) for name in option.opts}
        serials = [
            argument
            for argument in args
            if argument[0:1] == "-" and argument not in options and documents.is_serial(argument)
        ]
        others = [
            argument for argument in args if argument not in serials and argument != "--"
        ]  # declared below
        return super().parse_args(ctx, [*others, "--", *serials] if serials else others)


@authority.command(
    cls=SerialParam,
    acts=("revoke-grant", "{serials}"),
    examples=[("muster authority revoke SERIAL", "`list` prints the serial numbers")],
)
@click.argument("serials", nargs=-1, required=True, metavar="SERIAL...")
@click.option("--unseen", is_flag=True, help="Accept serial numbers of authorities without grants.")
@by_option
@connection.options
@command.pass_invocation
def revoke(
    invocation: command.Invocation,
    serials: tuple[str, ...],
    unseen: bool,
    by: Path | None,
    to: connection.ConnectionOptions,
) -> None:
    """Revoke grants. When the command returns, all notifiers have stopped accepting them.

    SERIAL is the serial number of a grant, or of an authority: then all its grants are revoked too.
    """
    import time

    from muster.core import errors
    from muster.trust import documents

    for serial in serials:
        if not documents.is_serial(serial):
            raise errors.InvalidInput(
                f"{serial[:80]!r} is not a serial number", hint="see `muster authority list`"
            )
    issuer = signer(invocation, by)

    async def work() -> dict[str, str]:
        from muster.notify import client, queries

        async with await connection.connect(invocation, to) as bus, client.NotifyClient(bus) as mine:
            listed = await queries.list_grants(bus)
            there = {serial for issued in listed for serial in (issued.serial, *issued.mandates)}
            if not unseen and (missing := [serial for serial in serials if serial not in there]):
                raise errors.NotFound(
                    f"there is no grant with the serial number {', '.join(missing)}",
                    hint="see `muster authority list`; use --unseen for an authority without grants",
                )
            tried = 0
            while True:
                number, sealed = await queries.next_revocations(bus, issuer, serials, now=time.time())
                try:
                    await mine.revoke(sealed)
                    break
                except errors.Refused:
                    if number == tried:  # else there was a concurrent revocation, which has to be kept
                        raise
                    tried = number
            return {issued.serial: issued.status for issued in await queries.list_grants(bus)}

    known = command.run(work())
    if still := [serial for serial in serials if known.get(serial) == "valid"]:
        raise errors.Forbidden(
            f"another authority granted {', '.join(still)}",
            hint="revoke it as that authority or as the root (--by)",
        )
    invocation.printer.item({"revoked": list(serials)}, f"revoked {', '.join(serials)}")


leaf.add(
    authority,
    operations.GRANTS,
    name="list",
    empty="there are no grants",
    examples=[("muster authority list", "")],
)


@authority.command(
    acts=("appoint", "{name}"),
    examples=[
        ("muster authority appoint northwest --tier 2 --may _command_region=northwest --to nw.json", "")
    ],
)
@click.argument("name")
@click.option(
    "--tier",
    type=command.CountParam(1, 98),
    required=True,
    help="Tier; lower than the tier of the appointing authority.",
)
@click.option(
    "--may",
    "rules",
    multiple=True,
    required=True,
    metavar="NAME[=VALUE,…]",
    help="An attribute it may grant: with these values, with LOW..HIGH, or with any value.",
)
@command.duration("--lifetime", "365d", "Lifetime.")
@click.option(
    "--to",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="File for its key and mandates (secret).",
)
@by_option
@command.pass_invocation
def appoint(
    invocation: command.Invocation,
    name: str,
    tier: int,
    rules: tuple[str, ...],
    lifetime_s: float,
    path: Path,
    by: Path | None,
) -> None:
    """Appoint an authority of a lower tier and write its key and mandates to a file."""
    import time

    import msgspec

    from muster.core import files
    from muster.trust import documents, nkeys

    key = nkeys.KeyPair.create(nkeys.KeyKind.ACCOUNT)
    mandates = signer(invocation, by).appoint(
        key.public,
        name,
        tier=tier,
        may_grant=dict(map(_rule, rules)),
        now=time.time(),
        lifetime_s=lifetime_s,
    )
    files.create(path, msgspec.json.encode({"name": name, "seed": key.seed, "mandates": mandates}))
    serial = documents.serial_of(mandates[0])
    invocation.printer.item(
        {"name": name, "tier": tier, "file": str(path), "serial": serial},
        f"{name} was appointed; its key: {path} (serial {serial})",
    )


def _rule(text: str) -> tuple[str, Any]:
    from muster.notify import documents as notify_documents
    from muster.trust import documents

    name, equals, allowed = text.partition("=")
    if not equals:
        return name, documents.AnyValue()
    low, dots, high = allowed.partition("..")
    if dots:
        bounds: Any = (notify_documents.value(low), notify_documents.value(high))
        return name, documents.ValueRange(low=bounds[0], high=bounds[1])
    listed: Any = tuple(map(notify_documents.value, allowed.split(",")))
    return name, documents.ValueIn(values=listed)

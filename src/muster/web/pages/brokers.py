"""The page of the broker network: brokers, links and traffic."""

from __future__ import annotations

from muster.bus.brokers import operations
from muster.web.components import page, plots, records, widgets
from muster.web.components.html import Markup, join, tag

PLOTS_MAX = 12


def brokers(request: page.PageRequest) -> page.DashboardPage:
    source = request.web.source

    def rates() -> dict[str, float]:
        return source.feed.load[-1][1] if source.feed.load else {}

    async def listed() -> Markup:
        now = rates()
        return records.table(
            await source.feed.brokers(),
            (*operations.BROKERS.columns, "cpu_percent", "memory_bytes"),
            cells={
                "pid": lambda broker: broker.pid,
                "#in": lambda broker: widgets.rate(now.get(f"{broker.name} in", 0.0)),
                "#out": lambda broker: widgets.rate(now.get(f"{broker.name} out", 0.0)),
            },
            label="Brokers",
            none="The domain has no brokers of its own.",
        )

    async def links() -> Markup:
        return records.table(
            (await source.feed.links())[:200],
            operations.LINKS.columns,
            cells={"up": lambda link: widgets.badge("up" if link.up else "down")},
            label="Links",
            none=widgets.empty(
                "There are no links."
                if len(await source.feed.brokers()) > 1
                else "A single broker needs no links.",
                join("Link two brokers: ", tag("code", "muster broker link A B"), "."),
            ),
        )

    async def measured() -> list[plots.Plot]:
        return [
            plots.Plot("broker", "messages", broker.name, broker.name)
            for broker in await source.feed.brokers()
        ][:PLOTS_MAX]

    return page.DashboardPage(
        "Brokers",
        (
            page.PageSection("listed", "Brokers", listed, ("brokers",), 3.0),
            page.PageSection("links", "Links", links, ("brokers",), 5.0),
            plots.section(request, "Messages of each broker", measured, id="brokers", wide=True),
        ),
        lead="Brokers carry all messages. The topology shows what is connected to them.",
    )

"""The page of the broker network: brokers, links and traffic."""

from __future__ import annotations

from muster.bus.brokers import control, operations
from muster.web.components import charts, page, plots, records, widgets
from muster.web.components.html import Markup, join, tag

PLOTS_MAX = 12


def _round_trip(link: control.LinkRow) -> str:
    return widgets.seconds(None if link.round_trip_ms is None else link.round_trip_ms / 1000)


def brokers(request: page.PageRequest) -> page.DashboardPage:
    source = request.web.source

    def rates() -> dict[str, float]:
        return source.feed.load[-1][1] if source.feed.load else {}

    async def picture() -> Markup:
        running, links = await source.feed.brokers(), await source.feed.links()
        now = rates()
        through = {
            broker.name: now.get(f"{broker.name} in", 0.0) + now.get(f"{broker.name} out", 0.0)
            for broker in running
        }
        most = max(through.values(), default=0.0) or 1.0
        carried = {link.id: link.in_messages + link.out_messages for link in links}
        heaviest = max(carried.values(), default=0) or 1
        nodes = [
            charts.GraphNode(
                broker.name,
                widgets.severity_class(broker.state),
                f"{widgets.count(broker.connections or 0, 'client')}, {widgets.rate(through[broker.name])}",
                through[broker.name] / most,
            )
            for broker in running
        ]
        edges = [
            charts.GraphEdge(
                link.near,
                link.far,
                link.up,
                f"{link.kind}, {_round_trip(link)}" if link.up else f"{link.kind}, down",
                carried[link.id] / heaviest,
            )
            for link in links
        ]
        up = f"{sum(link.up for link in links)} of {len(links)} links up"
        return charts.graph(nodes, edges, label=f"{widgets.count(len(running), 'broker')}, {up}")

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
            page.PageSection("picture", "Network", picture, ("brokers",), 3.0),
            page.PageSection("listed", "Brokers", listed, ("brokers",), 3.0),
            page.PageSection("links", "Links", links, ("brokers",), 5.0),
            plots.section(request, "Messages of each broker", measured, id="brokers", wide=True),
        ),
        lead="Brokers carry all messages. Larger circles and thicker links mean more traffic.",
    )

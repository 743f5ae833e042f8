"""The broker network as a picture: who is there, what joins them, and how much goes over it."""

from __future__ import annotations

from muster.web.components import charts, page, widgets
from muster.web.components.html import Child, Markup, join, tag


def brokers(seen: page.PageRequest) -> page.DashboardPage:
    source = seen.known.source

    def rates() -> dict[str, float]:
        return source.load[-1][1] if source.load else {}

    async def picture() -> Markup:
        found, links = await source.brokers(), await source.links()
        now = rates()
        through = {
            one["name"]: now.get(f"{one['name']} in", 0.0) + now.get(f"{one['name']} out", 0.0)
            for one in found
        }
        most = max(through.values(), default=0.0) or 1.0
        carried = {one["id"]: one["in_messages"] + one["out_messages"] for one in links}
        heaviest = max(carried.values(), default=0) or 1
        nodes = [
            charts.GraphNode(
                one["name"],
                widgets.severity_class(one["state"]),
                f"{widgets.count(one.get('connections') or 0, 'client')}, {through[one['name']]:,.0f}/s",
                through[one["name"]] / most,
            )
            for one in found
        ]
        edges = [
            charts.GraphEdge(
                one["near"],
                one["far"],
                one["up"],
                f"{one['kind']}, {one['round_trip_ms']} ms" if one["up"] else f"{one['kind']}, down",
                carried[one["id"]] / heaviest,
            )
            for one in links
        ]
        up = f"{sum(one['up'] for one in links)} of {len(links)} links up"
        return charts.graph(nodes, edges, label=f"{widgets.count(len(found), 'broker')}, {up}")

    async def listed() -> Markup:
        now = rates()
        rows: list[list[Child]] = [
            [
                one["name"],
                widgets.badge(one["state"]),
                one["url"],
                one.get("connections"),
                f"{now.get(one['name'] + ' in', 0.0):,.0f}/s",
                f"{now.get(one['name'] + ' out', 0.0):,.0f}/s",
                widgets.percent(one.get("cpu_percent")),
                widgets.size(one.get("memory_bytes")),
                one["restarts"],
            ]
            for one in await source.brokers()
        ]
        return widgets.table(
            ["Broker", "State", "Address", "#Clients", "#In", "#Out", "#CPU", "#Memory", "#Restarts"],
            rows,
            label="Brokers",
            none="The domain has no brokers of its own.",
        )

    async def links() -> Markup:
        rows: list[list[Child]] = [
            [
                f"{one['near']} – {one['far']}",
                one["kind"],
                widgets.badge("up" if one["up"] else "down"),
                "–" if one["round_trip_ms"] is None else f"{one['round_trip_ms']} ms",
                f"{one['in_messages']:,}",
                f"{one['out_messages']:,}",
            ]
            for one in (await source.links())[:200]
        ]
        return widgets.table(
            ["Link", "Kind", "State", "#Round trip", "#Messages in", "#Messages out"],
            rows,
            label="Links",
            none=widgets.empty(
                "Nothing joins these brokers."
                if len(await source.brokers()) > 1
                else "One broker needs no links.",
                join("Link two: ", tag("code", "muster broker link A B"), "."),
            ),
        )

    async def load() -> Markup:
        names = sorted({name for _, some in source.load for name in some if name.endswith(" in")})[:3]
        return join(
            charts.lines(
                [
                    charts.ChartLine(
                        name.removesuffix(" in"),
                        [(at, some.get(name)) for at, some in source.load],
                        f"line-{index + 1}",
                    )
                    for index, name in enumerate(names)
                ],
                label="Messages into each broker in a second",
                unit="/s",
            )
        )

    return page.DashboardPage(
        "Brokers",
        (
            page.PageSection("picture", "The network", picture, ("brokers",), 3.0),
            page.PageSection("listed", "Brokers", listed, ("brokers",), 3.0),
            page.PageSection("links", "Links", links, ("brokers",), 5.0),
            page.PageSection("load", "Messages into each broker", load, (), 5.0),
        ),
        lead="Brokers carry every message. A larger circle has more traffic; a thicker link carries more.",
    )

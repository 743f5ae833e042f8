"""A service in a few lines: it replies to requests, works through a queue, and receives events.

muster up --detach
python examples/service.py &
muster request prices/chair          # 17.5
muster message send queue:orders '{"item": "chair", "count": 4}'
muster pub orders/done ''            # prints what was ordered so far
"""

from __future__ import annotations

import msgspec

import muster

PRICES = {"chair": 17.5, "table": 80.0}


class Order(msgspec.Struct):
    item: str
    count: int


def main() -> None:
    with muster.open() as m:
        ordered: list[Order] = []

        @m.on("prices/*")
        def price(message: muster.Message) -> str:
            """What a handler returns is the reply."""
            return str(PRICES.get(message.topic.rpartition("/")[2], "unknown"))

        @m.on("queue:orders")
        def order(order: Order) -> None:
            """If this raises, the message is delivered again."""
            ordered.append(order)
            m.publish("orders/accepted", {"item": order.item, "price": PRICES[order.item] * order.count})

        @m.on("orders/done")
        def done() -> None:
            print(*ordered, sep="\n", flush=True)

        print(f"serving as {m.identity}; Ctrl-C ends it", flush=True)
        m.run()


if __name__ == "__main__":
    main()

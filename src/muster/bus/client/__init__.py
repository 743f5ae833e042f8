"""The connection to a broker: sockets, parser, requests, subscriptions."""

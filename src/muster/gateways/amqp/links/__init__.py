"""The ends of links: producers, consumers, transactions."""

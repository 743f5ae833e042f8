"""Which broker a client should use."""

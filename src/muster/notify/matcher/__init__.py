"""Which receivers get an event: columnar index over receivers and policies."""

"""The notifier process: events, grants, durable delivery, queries."""

"""Delivers persistent messages from the log to consumers; one active dispatcher under a lease."""

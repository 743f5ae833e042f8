"""Supervision of background tasks and child processes."""

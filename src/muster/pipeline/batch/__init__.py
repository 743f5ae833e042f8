"""Batch jobs over the history."""

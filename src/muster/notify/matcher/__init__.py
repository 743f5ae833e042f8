"""Matching of events with receivers: a columnar index over receivers and policies."""

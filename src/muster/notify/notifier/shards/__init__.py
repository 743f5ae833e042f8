"""Shards of receivers: ownership, log, snapshots, summaries."""

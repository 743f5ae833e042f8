"""Replicas in memory: placement, demand, peers."""

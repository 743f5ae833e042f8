"""Desired state, assignments, operations and rollouts; one active endpoint under a lease."""

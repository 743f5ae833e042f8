"""Workloads: clients that use one service, and record what they did and what came back."""

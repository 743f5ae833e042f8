"""Fault drills on real processes: workloads, faults, and what the clients saw."""

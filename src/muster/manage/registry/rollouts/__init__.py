"""Gradual changes of many resources: waves, health gates, reverts."""

"""Spark looks for packages of such names: so ``format("muster")`` and ``USING muster`` work unregistered."""

from muster.pipeline.source.data_source import MusterDataSource as DefaultSource

__all__ = ["DefaultSource"]

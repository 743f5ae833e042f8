"""Measurements: the last minutes in memory, and what charts, the map and timelines show of them."""

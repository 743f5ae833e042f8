"""What the dispatchers of different partitions do together."""

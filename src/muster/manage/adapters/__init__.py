"""Adapters: each turns management operations into the acts of one kind of resource. One small file each."""

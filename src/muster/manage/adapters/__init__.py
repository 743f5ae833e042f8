"""Adapters: each operates one type of resource. One small file each."""

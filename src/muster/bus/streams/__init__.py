"""Durable streams, key/value buckets, group commit."""

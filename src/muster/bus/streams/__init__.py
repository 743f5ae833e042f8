"""Durable streams, consumers, key/value buckets, group commit."""

"""The domain's own brokers and their configuration."""

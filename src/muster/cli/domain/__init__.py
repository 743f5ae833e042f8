"""Help section "Domain": life cycle, brokers, credentials, backup, diagnostics."""

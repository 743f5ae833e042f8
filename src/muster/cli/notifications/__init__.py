"""Help section "Notifications": events, receivers, authorities."""

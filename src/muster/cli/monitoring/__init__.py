"""Help section "Monitoring": sensors, channels, reports, alerts, pipeline."""

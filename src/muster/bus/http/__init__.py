"""The one HTTP client, the small HTTP server, health endpoints, OTLP export."""

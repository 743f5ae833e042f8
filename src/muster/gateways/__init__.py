"""Foreign protocols. A gateway authenticates first, then maps each request to a service client."""

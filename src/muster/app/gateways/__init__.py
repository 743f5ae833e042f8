"""The gateways as components of a domain, and their clients' connections to its bus."""

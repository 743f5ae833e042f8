"""One adapter per service that starts, stops and checks it as a component of a domain."""

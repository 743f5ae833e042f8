"""Hosts, TLS contexts and HTTP/1 framing."""

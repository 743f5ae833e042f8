"""Readers and writers with limits: XML, YAML, TOML, base64url."""

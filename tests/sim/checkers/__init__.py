"""Judges of a history. Each returns a text for every violation; none means that the guarantee held."""

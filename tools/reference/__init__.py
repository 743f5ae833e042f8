"""Generators of the pages in docs/reference; tests compare the pages with the code."""

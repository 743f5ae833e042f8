"""Shared test support for this project and its users: a pytest plugin, fixtures, a virtual clock,
`eventually`.

The product does not import this package.
"""

"""Muster: a publish/subscribe control plane for fleets of services.

Folders, from the top of the house to its foundation (ARCHITECTURE.md is the map, and a test compares
the two): ``cli``, ``app``, ``testing``, then the services, then ``bus``, ``store``, ``trust``, then
``predicates``, then ``core``.
"""

__version__ = "0.1.0"

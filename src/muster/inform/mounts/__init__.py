"""Other registries as mounts: `find` searches them together with the contexts, and `get` reads from them.

Guaranteed: each result states its mount; an unavailable or slow mount is reported and does not delay the
others beyond its timeout.  Not guaranteed: writes to a mount, or caching.
"""

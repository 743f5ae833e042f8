"""Other registries, mounted: `find` searches them beside our own contexts, and `get` reads from them.

Promised: each answer says which mount it came from; one that is down or slow is named, and costs the others
nothing.  Not promised: that anything is ever written there, or kept here.
"""

"""A fleet that puts itself back together: manifests, adapters, managers, the registry, bootstrap, topologies.

Promised: what was applied is kept so, whichever process dies; an operation is carried out for one owner at a
time, and a manager that was superseded is refused by the adapter; an operation whose outcome is known is not
repeated, and one whose outcome cannot be known is told as in doubt; nobody acts upon what is merely unheard;
a secret is told to the agent whose resource needs it, and to nobody else.
Not promised: that a resource moves to another machine when its own is lost.
"""

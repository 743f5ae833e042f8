"""Management of a fleet: manifests, adapters, managers, the registry, bootstrap, topologies.

Guaranteed: an applied manifest stays in force whichever process fails. An operation is executed for one owner
at a time; an adapter refuses a manager that was superseded. An operation whose outcome is known is not
repeated; one whose outcome cannot be known is reported as in doubt. No action is taken on a resource only
because it is silent. A secret is delivered only to the agent whose resource needs it.

Not guaranteed: that a resource without `reschedule` moves to another machine when its own is lost.
"""

"""WS-Management (DSP0226): the fleet for clients that speak it.

Promised: Identify, Get, Put (with fragments), Create, Delete, Rename, Enumerate with its modes, Subscribe
with push delivery, and operations as methods, each done through `muster.manage.client` under the identity of
whoever logged in, so that a door gives nobody more rights than the bus does; the standard's faults.

Not promised: that enumerations and subscriptions outlive the process of the door.  A client whose context is
unknown begins again; one whose subscription is, hears so when it renews.
"""

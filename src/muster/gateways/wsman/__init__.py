"""WS-Management (DSP0226): management of resources for clients of that standard.

Supported: Identify, Get, Put (with fragments), Create, Delete, Rename, Enumerate with its modes, Subscribe
with push delivery, and operations as methods, with the faults of the standard.  All use
`muster.manage.client` with the identity of the caller, so the endpoint gives no rights beyond those on the
bus.

Not guaranteed: enumerations and subscriptions do not survive the process of the endpoint.  A client with an
unknown enumeration starts again; a client with an unknown subscription gets an error when it renews it.
"""

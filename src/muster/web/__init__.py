"""The dashboard and the REST API.

`server` builds one ASGI application from ``/api/v1`` (`rest`) and the pages (`pages`).  All reads go through
the read model of the process (`data`), a cache that messages from the bus keep fresh.  All operations go
through `actions.ActionRunner`, which checks the role, uses the bus with the person's own identity, and
records the operation in the activity log.  Pages are rendered on the server; they are readable without a
script, and a small script updates them.

The package stores no state except logins, and gives no guarantees of its own.  It uses services only through
their clients and protocols.
"""

"""REST and the dashboard: the domain as people and their programs see it.

`server` builds one ASGI application: ``/api/v1`` (`rest`), the pages (`pages`), and whatever other doors are
mounted beside them.  Everything read goes through one cache for the process (`source`), which the bus keeps
fresh; everything done goes through one desk (`acts`), which asks for the right role, speaks on the bus under
the person's own identity, and writes the audit.  Pages are made here and sent whole; the browser needs no
script to read them, and only a little to keep them live.

It promises nothing of its own: it keeps no state but who is logged in.  It talks to services by their clients
and protocols only.
"""

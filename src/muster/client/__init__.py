"""What programs call: `muster.open` and `muster.open_async`, with the domain found as commands find it.

`front.AsyncMuster` and its parts wrap the clients of the services; they implement no protocol.  `synchronous`
has the same objects with blocking calls.  The package is above `app`, which has the homes and their keys.
"""

"""Direct connections: two processes exchange the messages of the bus without a broker between them.

The side that listens (`listener`) serves the subscriptions of its bus on such connections too, so a handler
is registered once and serves both ways. The other side (`dialer`) connects, and a bus that prefers direct
connections (`bus.DirectBus`) uses the broker for everything that has none. `nearest` finds the process of a
service to connect to.

- **Proof.** The listener signs a challenge of the client with the key that was announced over the bus, then
  the client signs one with the key of its credentials. Each signature names its purpose, so none can be used
  at a broker. Outside loopback the connection has TLS.
- **Rights.** The listener applies what a broker would: the permissions of the credentials, their revocation
  and their expiry. Admission and quotas are those of the handlers, which do not know how a message came.
- **Falling back.** A request that cannot be sent goes to the broker. One that was sent, and has no reply when
  the connection ends or after the time of its repetition, is repeated over the broker, if it may be repeated
  at all (`api.Repetition`).

Not guaranteed: an order between messages of both ways.
"""

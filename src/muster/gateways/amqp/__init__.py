"""The AMQP 1.0 gateway: for Java clients with Qpid JMS, and any other AMQP client.

``protocol.sasl`` authenticates, ``protocol.frames`` encodes the frames that transfer messages, and
``protocol.engine`` implements the protocol without a socket. ``connection`` serves one client connection,
``links`` are its producers and consumers, and ``gateway`` listens. Messages are converted in
``message.amqp_format``. This is the only package that imports proton.

Clients that logged in as the same identity share a bus connection under it (``bus_connections``), so the
broker's permissions apply to them.
"""

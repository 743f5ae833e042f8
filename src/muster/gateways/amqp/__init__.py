"""The AMQP 1.0 gateway: Java clients through Qpid JMS, and everyone else who speaks it.

``sasl`` says who is there, ``frames`` reads and writes what moves messages, ``codec`` turns messages into
ours and back (all pure), ``engine`` speaks the protocol without a socket, ``bridge`` serves one connection,
``server`` listens.  The only code that imports proton.  Each connection has a bridge of its own.  Those that
logged in as the same identity share a connection to the bus under it (``trunks``), so the broker's
permissions hold for them.
"""

"""UDDI v3 at a SOAP door: Inquiry, Publication and Security, over the same contexts as everything else.

Promised: what is published here `find` finds, and what is kept as a service entry plain UDDI clients see;
keys, ownership, find qualifiers and error codes are the standard's.  A save is checked whole before
anything of it is written.  Not promised: that several entities of one save appear at one moment (each is a
context of its own); the APIs for custody, subscription, replication and value sets; that signatures are
verified.
"""

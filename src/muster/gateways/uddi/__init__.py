"""UDDI v3 over SOAP: Inquiry, Publication and Security, over contexts.

Guaranteed: `find` returns what is published here, and UDDI clients see all service entries; keys, ownership,
find qualifiers and error codes follow the standard.  A save is validated completely before the first write.

Not supported: atomic saves of several entities (each is a context of its own); the APIs for custody,
subscription, replication and value sets; verification of signatures.
"""

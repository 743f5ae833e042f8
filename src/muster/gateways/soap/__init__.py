"""SOAP doors: safe XML, SOAP 1.1 and 1.2 envelopes and faults, WS-Addressing, and HTTP around them.

A service that offers a SOAP door writes a function from a `door.Call` to a `door.Answer`, in elements of
`muster.core.formats.xml`; it knows neither a parser nor an HTTP server.  Promised: nothing that a stranger
sends is read beyond stated bounds, no document type, entity or address in it is ever followed, and what is
refused gets the fault that the standard names and a counter by reason, and changes nothing.

Not promised: attachments, WS-Security, signatures.
"""

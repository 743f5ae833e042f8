"""SOAP endpoints: safe XML, SOAP 1.1 and 1.2 envelopes and faults, WS-Addressing, and HTTP.

A service provides a function from `endpoint.SoapRequest` to `endpoint.SoapResponse`, with elements of
`muster.core.formats.xml`; it needs neither a parser nor an HTTP server.

Guaranteed: input is read only up to stated limits; document types, entities and external addresses in it are
never followed; a rejected request gets the fault of the standard, is counted by reason, and changes nothing.

Not supported: attachments, WS-Security, signatures.
"""

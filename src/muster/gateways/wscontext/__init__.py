"""WS-Context: activities and their contents for SOAP clients, over the sessions of the information service.

Promised: begin, complete, getStatus, setTimeout and getTimeout (the context service), getContents and
setContents (the context manager), nested activities, in SOAP 1.1 and 1.2, with the WSDL of both published;
answers on the connection, or posted to an address that the settings allow.

The final WSDL of the standard was not to be had: this profile keeps its namespace and its names, and its own
WSDL says the rest.
"""

"""WS-Context: activities and their contents for SOAP clients, over the activities of the information service.

Supported: begin, complete, getStatus, setTimeout and getTimeout (the context service), getContents and
setContents (the context manager), nested activities, SOAP 1.1 and 1.2, WSDL of both services; replies on the
connection, or posted to an address that the settings allow.

The final WSDL of the standard is not available: this profile uses its namespace and names, and its own WSDL
defines the rest.
"""

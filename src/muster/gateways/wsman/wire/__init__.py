"""WS-Management on the wire: headers, filters, fragments, XML of resources."""

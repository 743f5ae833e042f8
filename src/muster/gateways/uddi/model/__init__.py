"""UDDI data: schema, entities, keys, matching, errors."""

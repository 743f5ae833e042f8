"""Fleet state in columns and its roll-up by group, zone and system."""

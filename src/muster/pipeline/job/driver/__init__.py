"""Which process is the driver, where it continues, and how a former driver is kept from acting."""

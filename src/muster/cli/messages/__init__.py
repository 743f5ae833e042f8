"""Help section "Messages": publish/subscribe, JMS, gateways."""

"""The JMS API: connections, sessions, producers, consumers."""

"""AMQP 1.0 without sockets: frames, SASL, the engine."""

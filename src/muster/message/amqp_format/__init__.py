"""Pure: AMQP 1.0 types and messages, which every reader of a message sent over AMQP needs."""

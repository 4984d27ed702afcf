"""The only place the three kinds of process meet: messages, framing, addresses, sockets."""

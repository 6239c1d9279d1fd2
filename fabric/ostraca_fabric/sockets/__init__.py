"""Non-blocking sockets: streams, TCP options, TLS."""

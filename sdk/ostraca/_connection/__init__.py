"""Connect a worker to an agent: resolve, dial, session, I/O loop, streams."""

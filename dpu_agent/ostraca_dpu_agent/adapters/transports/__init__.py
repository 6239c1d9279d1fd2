"""Transports between staging memory and arenas: inline frames or NIXL."""

"""Compose processes from components: the embedded fabric, transports, state directories."""

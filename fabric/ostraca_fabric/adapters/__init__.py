"""Adapters: each does what a port promises with one library, or with none."""

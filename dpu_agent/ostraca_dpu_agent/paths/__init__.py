"""Paths to enclosures: ``keeper`` keeps this host connected to those of the map, ``flash_work`` does for the
admin service what only a host with a path can: look at drives, measure them, format them.
"""

"""Paths to enclosures.

``keeper`` keeps this host connected to the enclosures of the map. ``flash_work`` serves the admin service
with operations that need a path: inspect, measure and format drives.
"""

"""Connectors of the SDK to engines, one package for each.

Importing this package loads none of them.
"""

"""Connectors: what plugs the SDK into engines, one package for each. Importing this loads none of them."""

"""Value types of the fabric: blocks, chains, volumes, layouts, drives, map. Pure."""

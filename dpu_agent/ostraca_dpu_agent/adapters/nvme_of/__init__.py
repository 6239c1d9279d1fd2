"""Connections to enclosures: Linux NVMe-oF, or directories of files."""

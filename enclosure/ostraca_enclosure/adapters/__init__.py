"""Adapters for drives and exports: files for laptops and CI, NVMe drives and nvmet."""

"""Code off by default and never run on real hardware: NVMe reservations."""

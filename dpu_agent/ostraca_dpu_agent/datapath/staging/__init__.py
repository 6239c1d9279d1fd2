"""Registered memory: leases, wait queue, tenant quotas, DRAM cache."""

"""Serve sessions of workers and peers: authentication, volumes, quotas, limits."""

"""Keep a live session: health probes, failover, failback, transfer reconciliation."""

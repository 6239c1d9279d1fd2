"""Description of a process: status, metrics, conditions, logs. Pure except for log writers."""

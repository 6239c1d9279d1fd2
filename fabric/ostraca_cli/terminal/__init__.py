"""Write to terminals and logs, and parse sizes and durations."""

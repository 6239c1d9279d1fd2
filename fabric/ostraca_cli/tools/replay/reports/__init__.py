"""Report a replay: statistics, tables, plots."""

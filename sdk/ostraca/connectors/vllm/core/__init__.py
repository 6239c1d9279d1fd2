"""Decisions of the tier. Pure: no I/O; time is an argument, in seconds of one clock."""

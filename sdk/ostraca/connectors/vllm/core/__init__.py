"""What the tier decides. Pure: no I/O, no clock; time arrives as an argument, in seconds of one clock."""

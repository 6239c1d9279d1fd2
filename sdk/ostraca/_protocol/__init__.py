"""Protocol of a client, as pure decisions: no socket, no thread, no clock.

Inputs are messages and time, outputs are messages and outcomes. ``specs`` refuses bad arguments.
``operations`` cuts a job into requests, and follows each request from start to end. ``silence`` judges a
quiet agent. ``ledger`` knows the user of each arena slot.
"""

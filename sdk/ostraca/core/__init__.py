"""What a client decides, purely: no socket, no thread, no clock.

Messages and time come in, messages and outcomes go out.

``checks`` refuses bad arguments, ``plan`` cuts a batch into requests, ``operations`` follows one request each
from its start to its end, ``ledger`` knows whose each slot of the arena is.
"""

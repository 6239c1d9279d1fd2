"""Slots of one piece of memory: who may write to which bytes, and since when they are free again.

Memory is cut into chunks, and each chunk into slots of one size while any of them is in use; a chunk without slots in use
takes any size again. A slot is *free*, *taken*, or in *quarantine*: under a transfer that is not known to have ended. Only
the word that the transfer has ended brings a slot back from quarantine; no time ever does (architecture §6).

Pure bookkeeping: it knows offsets, never addresses, and touches no memory. Not thread-safe; its user holds the lock.
"""

"""The wire, purely: what is said, how it is framed, and how a conversation begins.

Nothing here does I/O. ``ostraca_fabric.connection`` runs it on asyncio; the SDK runs it on a plain socket.
"""

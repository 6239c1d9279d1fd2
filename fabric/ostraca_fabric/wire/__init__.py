"""The wire, purely: what is said (``messages``), how it is framed (``frames``), how a conversation begins (``handshake``).

Nothing here does I/O. ``ostraca_fabric.connection`` runs it on asyncio; the SDK runs it on a plain socket.
"""

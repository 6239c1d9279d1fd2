"""Wire protocol: messages, frames and handshake. Pure, without I/O.

``ostraca_fabric.connection`` runs the protocol on asyncio; the SDK runs the protocol on a plain socket.
"""

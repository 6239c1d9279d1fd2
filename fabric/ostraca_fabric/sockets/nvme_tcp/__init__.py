"""NVMe over TCP without a kernel module: PDUs, commands, identities and their stream.

Both ends share this package: the target of an enclosure's daemon and the initiator of an agent. Sources are
the NVMe base specification 1.4 and the NVMe TCP transport specification 1.0. Digests and secrets are absent.
"""

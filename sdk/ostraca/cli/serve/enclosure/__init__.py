"""``ostraca serve enclosure``: the daemon of a box of drives.

``settings`` says what may be set, ``hosts`` reads who may connect, ``daemon`` puts the enclosure together
from its adapters, and ``command`` runs it until a signal.
"""

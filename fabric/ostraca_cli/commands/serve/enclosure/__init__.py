"""``ostraca serve enclosure``: the daemon of a box of drives.

``settings`` holds the settings, ``hosts`` reads the admitted hosts, ``daemon`` builds the enclosure from its
adapters, and ``command`` runs the daemon until a signal.
"""

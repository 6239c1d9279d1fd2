"""Commands that ask the admin service: ``enclosure``, ``operation``, ``audit``, and what there is to see of
a fabric.

``options`` are those that they share, ``client`` asks, ``answers`` are what it is told, ``errors`` why not,
``watching`` follows long work, ``view`` writes for people.
"""

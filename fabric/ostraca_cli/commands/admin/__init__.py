"""Commands served by the admin service.

``enclosure``, ``operation``, ``audit`` and the views of a fabric are here. ``options`` holds the shared
options, ``client`` sends requests, ``answers`` holds the response types and ``errors`` the refusals.
``watching`` follows long operations, ``view`` formats output for people.
"""

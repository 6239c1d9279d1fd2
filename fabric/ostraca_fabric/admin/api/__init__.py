"""The admin service over HTTP: ``app`` puts it together, ``enclosures``, ``drives``, ``fabric`` and
``history`` are its paths, ``forms`` what is sent and answered, ``problems`` how it refuses, ``access`` whom
it lets in.
"""

"""Commands served by the admin service.

``options`` holds shared options, requests and output; ``client`` sends requests, ``responses`` decodes the
answers, and ``errors`` has the refusals. ``watching`` follows long operations, ``view`` formats for people.
"""

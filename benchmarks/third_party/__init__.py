"""Benchmarks of other projects, run on the fabric through their own seams.

Their code is fetched by the user and never copied: each command takes ``--source``, a checkout of a pinned
commit.
"""

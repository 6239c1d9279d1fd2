"""What every part of an Ostraca fabric shares: its words as types, its formats, its ports and their adapters.

Read in dependency order: ``errors`` and ``ids``, then ``outcome``, ``extent``, ``layout``, ``chain`` and
``volume``, then ``keys``, ``tags`` and ``placement``, then ``wire`` and ``flash``. Everything up to there is
pure: no I/O, no clock, no randomness. ``ports`` says what the edges must do and ``adapters`` does it.
"""

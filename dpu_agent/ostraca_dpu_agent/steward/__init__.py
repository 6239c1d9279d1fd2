"""The steward: attaches drives and claims shards, in turns of observe, plan, apply.

``plan`` is pure: what the map and this agent's state say, and what to do next. ``apply`` does one step at a
time; a step that fails is not retried in place, the next turn observes again. Each turn ends with one
sentence. ``shards`` are those that are served, each of them a ``serving``.
"""

"""Controller: attaches drives and claims shards, in turns of observe, plan, apply.

``plan`` is pure: from the map and the agent's state to steps. ``controller`` observes and applies the steps
one at a time; the next turn observes again after a failure. ``served_shards`` and ``drive_attachments`` carry
out the steps.
"""

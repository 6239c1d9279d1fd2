"""Policies for writes to flash, one per file. Pure; time is an argument.

- ``endurance``: rating and remaining life of a drive
- ``write_budget``: level that rises with time and falls with every write
- ``ghost_filter``: memory of recently named blocks
- ``admission``: decision by budget and ghost filter
- ``break_even``: chains too short to be worth a load
"""

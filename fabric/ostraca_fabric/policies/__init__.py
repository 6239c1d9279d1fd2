"""What is written to flash, and what is not: policies, one to a file. Pure; time is an argument.

``endurance`` says what a drive is rated for, and how long it lasts. ``write_budget`` turns that into a level
that rises with time and falls with every write. ``ghost_filter`` remembers who was here before.
``admission`` decides by these two. ``break_even`` says which chains are too short to be worth a load.
"""

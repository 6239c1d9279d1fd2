"""Measures of the code base's structure and prose, each with a goal.

Run ``python -m scripts.structure`` in the repository root. ``config`` holds goals and folders;
each other module measures one thing. The measures derive packages and modules from the tracked files and know
no module by name.
"""

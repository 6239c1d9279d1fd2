"""The enclosure: a box of drives, and what it says about them.

``files`` is the file-backed enclosure of laptops and CI: its drives are plain files.
"""

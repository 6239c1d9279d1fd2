"""The enclosure: a box of drives, what it exports of them and to whom, and what it says about them.

Its daemon (``ostraca serve enclosure``) takes turns: it looks what drives there are and what is exported
(``ports``), decides which drives are exported (``choice``, by ``fit``) and what has to change (``plan``), and
changes it one step at a time (``steward``). What it has exported outlives it, and the next one finds it.

``files`` is the file-backed enclosure of ``ostraca up`` and ``ostraca fabric create``, without a daemon: its
drives are plain files, formatted when they are made.
"""

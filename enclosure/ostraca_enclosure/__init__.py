"""Enclosure: a box of drives with exports and reports.

The daemon (``ostraca serve enclosure``) works in turns. A turn observes drives and exports (``ports``), and
selects the drives to export (``drives``). Then the turn plans the changes (``plan``), and applies each step
(``controller``). Exports outlive the daemon, and the next daemon finds them.

``files`` is the file-backed enclosure of ``ostraca up`` and ``ostraca fabric create``, without a daemon.
Drives are plain files there, formatted at creation.
"""

"""Environment of daemons.

``state_directory`` locks a directory for each daemon. ``secret_files`` and ``reload`` read secrets from
files, also after changes. ``signals`` handles signals; ``notify`` informs the service manager.
"""

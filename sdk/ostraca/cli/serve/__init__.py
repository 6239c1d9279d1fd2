"""What every daemon needs around its work: a directory of its own (``state_directory``), secrets from files
that may change while it runs (``secret_files``, ``reloading``), signals, and the service manager
(``notify``).
"""

"""Commands of ``ostraca``, each in a module or package."""

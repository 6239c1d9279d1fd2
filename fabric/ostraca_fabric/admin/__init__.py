"""The admin service: what operators may change of a fabric, and the long work that follows.

``model`` is what is kept, ``desk`` takes changes, ``worker`` does the ``steps`` of long work (in ``bringing``
those that bring drives in), what they come to is said by ``judging`` and ``draining`` (pure), and ``api`` is
all of it over HTTP. Everything is kept in the fabric's records: any number of these services may run, and any
may die.
"""

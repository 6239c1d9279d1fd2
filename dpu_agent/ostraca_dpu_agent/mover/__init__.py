"""The mover: carries blocks between flash and the arenas of its own workers.

``routes`` says which owner to ask, ``space`` keeps what owners hand out for a put, ``staging`` and ``cache``
keep the memory, ``load`` brings verified blocks from flash into staging, ``pace`` knows how long that has
taken lately, and ``admission`` lets in what is worth it. ``get``, ``put`` and ``prefetch`` are the three
requests, drawn as in the architecture's data path; ``elsewhere`` hands a prefetch on to another agent.
"""

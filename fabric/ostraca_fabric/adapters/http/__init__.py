"""Pages of a daemon over HTTP: what people and Prometheus ask of it. Nothing on the data path.

``app`` answers (ASGI), ``server`` runs it by uvicorn on a thread of its own, within the limits of
``settings``, which can be read where uvicorn is not installed.
"""

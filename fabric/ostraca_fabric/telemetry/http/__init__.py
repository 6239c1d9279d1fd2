"""HTTP pages of a daemon for people and Prometheus, off the data path.

``app`` is the ASGI application. ``server`` runs the application by uvicorn on a separate thread, within the
limits of ``settings``. ``settings`` can be imported without uvicorn.
"""

"""Errors of image builds."""


class ImageError(Exception):
    """Image that cannot be built here; the message names the reason and a remedy."""

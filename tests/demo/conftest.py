"""The demo's tests need torch and transformers: where these are not installed, they are not collected."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("torch") and find_spec("transformers") else ["test_paging.py"]

"""The tutorial starts with the demo: where what that needs is not installed, it is not tested."""

from importlib.util import find_spec

_HAS_ALL = all(map(find_spec, ("torch", "transformers", "matplotlib", "rich", "nixl_cu12")))
collect_ignore = [] if _HAS_ALL else ["test_tutorial.py"]

"""Collection of the demo's tests only where the demo's requirements are installed."""

from importlib.util import find_spec

_HAS_ALL = all(map(find_spec, ("torch", "transformers", "matplotlib", "rich")))
collect_ignore = [] if _HAS_ALL else ["test_paging.py", "test_parts.py", "test_run.py"]

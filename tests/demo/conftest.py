"""The demo's tests need what the demo needs: where that is not installed, they are not collected."""

from importlib.util import find_spec

_HAS_ALL = all(map(find_spec, ("torch", "transformers", "matplotlib", "rich")))
collect_ignore = [] if _HAS_ALL else ["test_paging.py", "test_parts.py", "test_run.py"]

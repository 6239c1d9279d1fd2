"""The admin service is an extra of its own: where it is not installed, it is not tested."""

from importlib.util import find_spec

collect_ignore_glob = [] if all(map(find_spec, ("fastapi", "uvicorn"))) else ["test_*.py"]

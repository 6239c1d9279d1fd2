"""What holds for the whole suite."""

from __future__ import annotations

import os

# Tests kill workers in the midst of transfers, and UCX says so on the console, in words that would alarm a
# reader of a suite that passed. It must be said before UCX is loaded, here and in every process that a test
# starts.
os.environ.setdefault("UCX_LOG_LEVEL", "fatal")

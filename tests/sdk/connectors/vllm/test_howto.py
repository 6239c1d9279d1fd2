"""How-to page on vLLM, followed without a GPU: all commands in order, with the documented output."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from tests.sdk.connectors.vllm.follower import REPOSITORY, Follower, open_port, page_commands

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vLLM is not installed here; make test-vllm makes an environment that has it",
    ),
]

PAGE = (REPOSITORY / "docs" / "howto" / "engines" / "vllm.md").read_text()
ELSEWHERE = ("pip install", "scripts/setup-vllm", "source ", "vllm serve")
"""Commands with a GPU, or run before the test."""

THIRD = 3
"""Before the third question, the page says to restart vLLM."""
HEALTH = "http://localhost:8000/health"


def test_the_page_is_true_from_its_first_command_to_its_last(tmp_path: Path) -> None:
    (kv_json,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    (said,) = re.findall(r"^(Ostraca: uses .*?-)[0-9a-f]{16}(: .*? bytes>)", PAGE, re.MULTILINE)
    asked = 0
    port = open_port()
    with Follower(tmp_path, {"localhost:8000": f"localhost:{port}"}) as user:
        # The page's deadline is for a machine that does nothing else.
        patient = kv_json.replace('"agents"', '"lookup_deadline_s": 10.0,\n        "agents"')
        (tmp_path / "kv.json").write_text(user.here(patient))
        serve = ""
        for command, printed in page_commands(PAGE, ELSEWHERE):
            if command.startswith("ostraca up"):
                up = user.start(command, "up.log")
                assert up.stdout is not None
                assert up.stdout.readline() == user.here(printed)
            elif command.startswith("python -m vllm."):
                serve = f"{command} --port {port}"
                vllm = user.start_and_await(serve, "first.log", HEALTH)
            else:
                asked += "/v1/completions" in command
                if asked == THIRD and "/v1/completions" in command:
                    user.stop(vllm)
                    vllm = user.start_and_await(serve, "second.log", HEALTH)
                out = user.run(command)
                assert not printed or out == user.here(printed), command
    assert asked == THIRD
    for log in ("first.log", "second.log"):
        words = (tmp_path / log).read_text(errors="replace")
        assert re.search(re.escape(said[0]) + "[0-9a-f]{16}" + re.escape(user.here(said[1])), words)

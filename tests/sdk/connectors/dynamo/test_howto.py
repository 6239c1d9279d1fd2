"""How-to page on Dynamo, followed without a GPU: all commands in order, with the documented output."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
from tests.sdk.connectors.vllm.follower import REPOSITORY, Follower, open_port, page_commands

pytestmark = [
    pytest.mark.dynamo,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        importlib.util.find_spec("dynamo") is None,
        reason="Dynamo is not installed here; make test-dynamo makes an environment that has it",
    ),
]

ENGINES = REPOSITORY / "docs" / "howto" / "engines"
PAGE = (ENGINES / "dynamo.md").read_text()
WITH_GPU, WITHOUT_GPU = PAGE.split("## Without a GPU")
ELSEWHERE = ("scripts/setup-dynamo", "source ")
"""Commands run before the test."""
FRONTEND = "python -m dynamo.frontend"
WORKER = "DYN_SYSTEM_PORT=8081 "
FIRST, SECOND = ("8081", "20080"), ("8082", "20081")
"""Ports of the workers: metrics, and events."""


def test_the_page_is_true_from_its_first_command_to_its_last(tmp_path: Path) -> None:
    (kv_json,) = re.findall(r"```json\n(.*?)```", (ENGINES / "vllm.md").read_text(), re.DOTALL)
    assert f"with the ports {SECOND[0]} and {SECOND[1]}" in PAGE
    frontend = open_port()
    # The page's commands name no address of the frontend, and its hosts are not loopback alone.
    environment = {
        "DYN_FILE_KV": str(tmp_path / "discovery"),
        "DYN_HTTP_HOST": "127.0.0.1",
        "DYN_HTTP_PORT": str(frontend),
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_EVENT_PLANE_HOST": "127.0.0.1",
        "HOME": str(tmp_path),
        "TMPDIR": str(tmp_path),
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    ports = {port: str(open_port()) for port in (*FIRST, *SECOND)} | {
        "localhost:8000": f"localhost:{frontend}"
    }
    asked = 0
    with Follower(tmp_path, ports, **environment) as user:
        kv = json.loads(user.here(kv_json))
        extra = kv["kv_connector_extra_config"]
        extra["self_describing_kv_events"] = extra["secondary_tiers"][0]["enable_kv_events"] = True
        # The page's deadline is for a machine that does nothing else.
        extra["secondary_tiers"][0]["lookup_deadline_s"] = 10.0
        (tmp_path / "kv.json").write_text(json.dumps(kv, indent=2))
        for command, printed in page_commands(WITHOUT_GPU, ELSEWHERE):
            if command.startswith("ostraca up"):
                up = user.start(command, "up.log")
                assert up.stdout is not None
                assert up.stdout.readline().startswith("ready: ")
            elif command.startswith(FRONTEND):
                user.start_and_await(command, "frontend.log", "http://localhost:8000/health")
            elif command.startswith(WORKER):
                worker = command
                first = user.start_and_await(worker, "first.log", "http://localhost:8000/v1/models", "MODEL")
            else:
                asked += "/v1/completions" in command
                if asked == 2 and "/v1/completions" in command:
                    for theirs, others in zip(FIRST, SECOND, strict=True):
                        worker = worker.replace(theirs, others)
                    health = f"http://localhost:{SECOND[0]}/health"
                    user.start_and_await(worker, "second.log", health, "ready")
                    user.stop(first)
                out = user.run(command)
                assert not printed or out == user.here(printed), command
    assert asked == 2


def test_commands_with_a_gpu_differ_in_the_worker_alone() -> None:
    followed = page_commands(WITHOUT_GPU, ())
    others = [command for command in page_commands(WITH_GPU, ()) if command not in followed]
    assert [command.partition(" --")[0] for command, _ in others] == ["python -m dynamo.vllm"]
    events = others[0][0].partition("--kv-events-config")[2]
    assert any(command.endswith(events) for command, _ in followed)

"""The enclosure's guest as the host's guest speaks to it, over the management network.

A line of JSON each way, on a connection for each.
"""

from __future__ import annotations

import json
import socket
import socketserver
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from tests.scenarios.nvmeof.guest import ENCLOSURE, MANAGEMENT

PLACE = (f"{MANAGEMENT}{ENCLOSURE}", 9999)
_ANSWER_S = 150.0
_UP_S = 120.0


def ask(what: str, /, **how: object) -> Any:
    """Have the enclosure's guest do something, and return its answer."""
    until_s = time.monotonic() + _UP_S
    while True:
        try:
            with socket.create_connection(PLACE, timeout=_ANSWER_S) as connection:
                connection.sendall(json.dumps({"do": what, **how}).encode() + b"\n")
                with connection.makefile() as answers:
                    answer = json.loads(answers.readline())
                break
        except (OSError, ValueError) as error:
            if time.monotonic() > until_s:
                raise AssertionError(f"the enclosure's guest does not answer: {error}") from error
            time.sleep(0.5)
    assert "error" not in answer, answer["error"]
    return answer["is"]


def serve(actions: Mapping[str, Callable[..., object]], until: str) -> None:
    """Do what is asked, one after the other, until *until* was."""
    has_ended = False

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            nonlocal has_ended
            asked = json.loads(self.rfile.readline())
            what = asked.pop("do")
            try:
                answer = {"is": actions[what](**asked)}
            except Exception:  # noqa: BLE001 (whatever it is, the one who asked shall know)
                answer = {"error": traceback.format_exc()}
            self.wfile.write(json.dumps(answer).encode() + b"\n")
            has_ended = what == until

    with socketserver.TCPServer(PLACE, Handler) as server:
        while not has_ended:
            server.handle_request()

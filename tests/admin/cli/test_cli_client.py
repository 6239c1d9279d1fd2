"""What commands say where the admin service can't be reached, or does not let them in."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from rich.console import Console
from tests.admin.cli.commands import Commands
from tests.admin.service import TOKENS, AdminService
from tests.contract.network.certificates import Authority
from tests.fabric.membership.nodes import free_ports

from ostraca_admin.api.views import OperationView, StepView
from ostraca_cli import main
from ostraca_cli.commands.admin.view import operation_view
from ostraca_cli.commands.admin.watching import REPEAT_S, ProgressLines
from ostraca_fabric.sockets.default_paths import ADMIN_TOKEN_VARIABLE, ADMIN_URL_VARIABLE


def test_where_no_service_is_the_user_is_told_how_to_start_or_name_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (port,) = free_ports(1)
    assert main(["enclosure", "list", "--admin", f"http://127.0.0.1:{port}"]) == 1
    assert capsys.readouterr().err == (
        f"ostraca: no admin service answers at http://127.0.0.1:{port} (Connection refused): start "
        "`ostraca serve admin`, or give another URL (--admin URL, or OSTRACA_ADMIN_URL)\n"
    )


def test_a_token_is_asked_for_refused_and_read_from_a_file(
    service: AdminService, ostraca: Commands, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(ADMIN_TOKEN_VARIABLE)
    none = ostraca("enclosure", "list")
    assert none.code == 1
    assert "needs a token: give a token" in none.err
    file = tmp_path / "token"
    file.write_text("of-nobody-of-nobody\n")
    file.chmod(0o600)
    asked = ("enclosure", "list", "--token-file", str(file))
    assert "rejects this token: give a token" in ostraca(*asked).err
    file.write_text(f"{TOKENS['viewer']}\n")
    assert ostraca(*asked).code == 0
    refused = ostraca("enclosure", "drain", "shelf-1", "--token-file", str(file))
    assert (refused.code, refused.err) == (
        1,
        "ostraca: victor has the role viewer, and this needs operator\n",
    )
    file.write_text('[admin]\nalice = ["..."]\n')
    people = ostraca(*asked)
    assert (people.code, people.err) == (
        1,
        f"ostraca: {file} is no token file: write one token on one line, and nothing else\n",
    )
    file.chmod(0o644)
    assert "is open to other users" in ostraca(*asked).err
    monkeypatch.setenv(ADMIN_TOKEN_VARIABLE, "of\nnobody")
    assert ostraca("enclosure", "list").code == 2


def test_a_certificate_is_trusted_by_its_ca_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = Authority(tmp_path), Authority(tmp_path, "theirs")
    with AdminService(tmp_path, agents=0, tls=ours.files("admin", "127.0.0.1")) as service:
        ostraca = Commands(service, monkeypatch, capsys)
        assert service.url.startswith("https://")
        for ca in ((), ("--tls-ca", str(theirs.cert))):
            ran = ostraca("enclosure", "list", *ca)
            assert ran.code == 1
            assert f"the certificate of {service.url} is not trusted" in ran.err
        assert ostraca("enclosure", "list", "--tls-ca", str(ours.cert)).code == 0
        monkeypatch.setenv("OSTRACA_TLS_CA", str(ours.cert))
        assert ostraca("enclosure", "list").code == 0
        elsewhere = service.url.replace("127.0.0.1", "localhost")
        assert "is not trusted" in ostraca("enclosure", "list", "--admin", elsewhere).err
        plain = ostraca("enclosure", "list", "--admin", service.url.replace("https", "http"))
        assert plain.code == 1
        assert "try https://" in plain.err


def test_tls_to_a_service_without_it_is_told_so(service: AdminService, ostraca: Commands) -> None:
    ran = ostraca("enclosure", "list", "--admin", service.url.replace("http", "https"))
    assert ran.code == 1
    assert ran.err.endswith("try http://\n")


class _Elsewhere(BaseHTTPRequestHandler):
    """A server of something else."""

    def do_GET(self) -> None:
        is_json = self.path.startswith("/json")
        self.send_response(200)
        self.send_header("Content-Type", "application/json" if is_json else "text/html")
        self.end_headers()
        self.wfile.write(b'["?"]' if is_json else b"<p>Welcome!</p>")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def elsewhere() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Elsewhere) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_what_is_no_admin_service_is_asked_whether_it_is_one(
    elsewhere: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["enclosure", "list", "--admin", elsewhere]) == 1
    assert "is no admin service, by its response" in capsys.readouterr().err
    assert main(["enclosure", "list", "--admin", f"{elsewhere}/json"]) == 1
    assert "unreadable response" in capsys.readouterr().err


def test_variables_of_these_commands_are_no_mistake_to_the_service_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(ADMIN_URL_VARIABLE, "http://127.0.0.1:7480")
    monkeypatch.setenv(ADMIN_TOKEN_VARIABLE, TOKENS["admin"])
    monkeypatch.setenv("OSTRACA_ADMIN_LISTEN", "127.0.0.1:7481")
    assert main(["serve", "admin", "--print-settings"]) == 0
    shown = capsys.readouterr().out
    assert "7481" in shown
    assert TOKENS["admin"] not in shown
    monkeypatch.setenv("OSTRACA_ADMIN_LISTEM", "127.0.0.1:7481")
    assert main(["serve", "admin", "--print-settings"]) == 2


def _drain(*steps: StepView, progress: float = 0.0, ends_in_s: float | None = None) -> OperationView:
    subject = ("drain", "shelf-1", "", "", "")
    return OperationView("7", *subject, "running", "", progress, ends_in_s, "alice", None, None, steps)


def test_lines_say_again_what_a_long_step_says_only_now_and_then() -> None:
    now_s, lines = [1000.0], list[str]()
    show = ProgressLines(lambda: now_s[0], lambda line, _: lines.append(line))

    def told(message: str, ends_in_s: float | None = None) -> list[str]:
        lines.clear()
        step = StepView("no longer searched", "running", message, None, None, {})
        show.show(_drain(step, ends_in_s=ends_in_s))
        return list(lines)

    assert told("9%") == ["drain of shelf-1 (operation 7)", "  no longer searched: 9% ..."]
    assert told("8%") == []
    now_s[0] += REPEAT_S
    assert told("8%", 7200.0) == ["  no longer searched: 8%, within 2 h 0 min at most ..."]
    now_s[0] += REPEAT_S
    assert told("8%", 7200.0) == []
    assert told("\x1b[2J") == ["  no longer searched: \N{REPLACEMENT CHARACTER}[2J ..."]


def test_a_terminal_shows_all_steps_and_how_far_they_are() -> None:
    steps = (
        StepView("closed to writes", "done", "new blocks go to other enclosures", None, None, {}),
        StepView("no longer searched", "running", "9%", None, None, {}),
    )
    operation = _drain(*steps, progress=0.5, ends_in_s=90.0)
    console = Console(width=80)
    with console.capture() as captured:
        console.print(operation_view(operation, is_live=True))
    head, first, second, bar = captured.get().splitlines()
    assert head == "drain of shelf-1, operation 7: running"
    assert first.split() == [
        "✓",
        "closed",
        "to",
        "writes",
        "new",
        "blocks",
        "go",
        "to",
        "other",
        "enclosures",
    ]
    assert second.split()[1:] == ["no", "longer", "searched", "9%"]
    assert bar.endswith("50%, within 1 min 30 s at most")

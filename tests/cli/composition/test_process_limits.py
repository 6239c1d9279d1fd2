"""Commands without a home, a working directory, descriptors, threads or memory."""

import asyncio
import errno
import os
import pwd
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from ostraca_cli.composition.process_limits import error_text
from ostraca_cli.composition.transports import loop_factory
from ostraca_cli.program import main
from ostraca_fabric.errors import UsageError
from ostraca_fabric.sockets.default_paths import default_directory, directory_argument

MIB = 1 << 20

NOBODYS_UID = 54321
"""User without an entry in the passwd file."""


def without_passwd_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process be a user without an entry in the passwd file."""
    with pytest.raises(KeyError):
        pwd.getpwuid(NOBODYS_UID)
    monkeypatch.setattr(os, "getuid", lambda: NOBODYS_UID)


@pytest.mark.parametrize("home", ["", "relative/home", None])
def test_a_home_that_names_no_place_is_the_one_of_the_passwd_file(home: str | None) -> None:
    environment = {} if home is None else {"HOME": home}
    of_passwd = Path(pwd.getpwuid(os.getuid()).pw_dir)
    assert default_directory(environment) == of_passwd / ".local/state/ostraca"


def test_the_folder_for_state_needs_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    without_passwd_entry(monkeypatch)
    assert default_directory({"XDG_STATE_HOME": "/s"}) == Path("/s/ostraca")
    assert default_directory({"XDG_STATE_HOME": "relative", "HOME": "/h"}) == Path("/h/.local/state/ostraca")


@pytest.mark.parametrize("environment", [{}, {"HOME": ""}, {"HOME": "h", "XDG_STATE_HOME": "s"}])
def test_a_user_without_a_home_has_no_default_directory(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_passwd_entry(monkeypatch)
    with pytest.raises(UsageError, match=r"user 54321 has no home .*; pass --dir DIR, or set HOME"):
        default_directory(environment)


@pytest.mark.parametrize("argv", [["up"], ["status"], ["metrics"], ["fabric", "rebuild"]])
def test_without_a_home_a_command_lacks_the_default_of_dir_alone(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_passwd_entry(monkeypatch)
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert main(["--version"]) == 0
    assert main([*argv, "--help"]) == 0
    assert "(default: none, as HOME is not set)" in " ".join(capsys.readouterr().out.split())
    assert main(argv) == 2
    said = capsys.readouterr().err
    assert said.startswith("ostraca: no default directory is known: HOME is not set")
    assert said.count("\n") == 1
    # A directory that is named is taken, and then it is another thing that is wrong, or nothing.
    main([*argv, "--dir", str(tmp_path), *(["--print-settings"] if argv == ["up"] else [])])
    assert "HOME" not in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "~no-such-user/x", "/tmp/\udcff"])
def test_a_directory_that_names_no_place_is_bad_usage(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--dir", text]) == 2
    assert "--dir: " in capsys.readouterr().err


def test_a_home_with_a_percent_sign_does_not_break_the_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/100%s")
    assert main(["up", "--help"]) == 0
    assert "/100%s/ostraca" in capsys.readouterr().out


@pytest.mark.parametrize(("text", "path"), [("~", "/h"), ("~/x", "/h/x"), ("~//x", "/h/x"), ("/a/~", "/a/~")])
def test_a_tilde_is_the_home(text: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/h")
    assert directory_argument(text) == Path(path)


def in_a_deleted_directory(tmp_path: Path) -> Callable[[], None]:
    """Return a function for a child, to enter a directory and delete it."""

    def go() -> None:
        gone = tmp_path / "gone"
        gone.mkdir()
        os.chdir(gone)
        gone.rmdir()

    return go


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["--version"], 0, ""),
        (["status", "--dir", "rel"], 2, "'rel' is relative, and the working directory can't be told"),
        (["up", "--dir", "rel"], 2, "'rel' is relative, and the working directory can't be told"),
        (["doctor", "rel"], 1, "the working directory was removed"),
    ],
)
def test_in_a_deleted_directory_only_relative_paths_are_lacking(
    argv: list[str], code: int, said: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ostraca_cli", *argv],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=in_a_deleted_directory(tmp_path),
    )
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_no_argument_vector_at_all_is_bad_usage() -> None:
    program = "import sys; sys.argv = []; from ostraca_cli import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: ostraca ")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            PermissionError(errno.EACCES, "Permission denied", "/x"),
            "/x: permission denied; run this as the owner",
        ),
        (
            OSError(errno.EROFS, "Read-only file system", "/x"),
            "/x: the file system is mounted read-only; mount it",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device", b"/x"),
            "/x: the file system is full; free some space",
        ),
        (
            OSError(errno.EMFILE, "Too many open files", "/x"),
            "no file descriptor left (limit of this process:",
        ),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "this process has no memory left"),
        (OSError(errno.EDOM, "Of another kind", "/x"), "/x: Of another kind"),
        (OSError("a text alone"), "a text alone"),
        (FileNotFoundError(errno.ENOENT, "No usable temporary directory"), "No usable temporary directory"),
        (OSError(), "OSError"),
        (UsageError("our own"), "our own"),
        (MemoryError(), "this process has no memory left"),
        (RuntimeError("can't start new thread"), "can't start another thread"),
        (
            ImportError("libx.so: failed to map segment from shared object"),
            "a library can't be loaded (libx.so",
        ),
    ],
)
def test_what_surroundings_lack_is_a_sentence(error: Exception, said: str) -> None:
    assert said in error_text(error)
    assert "[Errno" not in error_text(error)


@pytest.mark.parametrize("error", [RuntimeError("a bug"), ImportError("no name x"), ValueError("a bug")])
def test_a_bug_is_no_lack(error: Exception) -> None:
    assert error_text(error) == ""


@pytest.mark.parametrize("argv", [["up", "--dir", "/proc/no"], ["serve", "agent", "--etcd", "127.0.0.1:1"]])
def test_more_memory_than_there_is_is_refused_at_the_start(argv: list[str]) -> None:
    command = [sys.executable, "-m", "ostraca_cli", *argv, "--set", f"memory.cache_bytes={1 << 50}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "an agent wants 1024.0 TiB of memory" in done.stderr
    assert "or lower memory.cache_bytes (1024.0 TiB)" in done.stderr


def test_an_agent_with_too_few_descriptors_is_refused_at_the_start() -> None:
    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))

    command = [sys.executable, "-m", "ostraca_cli", "serve", "agent", "--etcd", "127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30, preexec_fn=few)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "an agent needs at least 64 file descriptors, and the limit is 24" in done.stderr


@pytest.mark.parametrize(
    ("argv", "who"),
    [(["up", "--dir", "/proc/no"], "this fabric"), (["serve", "agent", "--etcd", "127.0.0.1:1"], "an agent")],
)
def test_too_few_threads_are_refused_with_both_numbers(argv: list[str], who: str) -> None:
    # A library asks for the stacks, 8 MiB each, in an address space that holds some of them.
    def few() -> None:
        resource.setrlimit(resource.RLIMIT_STACK, (256 * MIB, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_AS, (2048 * MIB, resource.RLIM_INFINITY))

    command = [sys.executable, "-m", "ostraca_cli", *argv]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30, preexec_fn=few)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    said = rf"{who} needs \d+ threads, and can start \d: raise ulimit -u"
    assert re.search(said, done.stderr), done.stderr


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Install a package in a state that fails to load."""

    def break_package(name: str) -> None:
        (tmp_path / f"{name}.py").write_text("raise ImportError('libm.so.6: version GLIBC_9 not found')")
        monkeypatch.syspath_prepend(tmp_path)
        for each in [each for each in sys.modules if each.partition(".")[0] == name]:
            monkeypatch.delitem(sys.modules, each)

    return break_package


def test_without_a_fast_loop_agents_run_on_asyncios(
    broken: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    broken("uvloop")
    assert loop_factory() is asyncio.SelectorEventLoop
    assert "uvloop is unavailable" in caplog.text
    assert "version GLIBC_9 not found" in caplog.text


def test_a_replay_without_pictures_says_why(
    broken: Callable[[str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    broken("matplotlib")
    monkeypatch.delitem(sys.modules, "ostraca_cli.tools.replay.reports.pictures", raising=False)
    few = ("--generate", "sessions=30,message_tokens=2000", "--segment-blocks", "2", "--capacity", "100%")
    assert main(["replay", *few, "--policies", "lru", "--out", str(tmp_path / "out")]) == 0
    assert "no pictures, as matplotlib can't be loaded: libm.so.6" in capsys.readouterr().err
    assert [each.name for each in (tmp_path / "out").iterdir()] == ["outcomes.json"]


def test_bench_without_a_folder_for_temporary_files_says_to_name_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    assert main(["bench"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "ostraca: no folder for temporary files can be written here: pass --dir DIR, or set TMPDIR"
    )


def test_what_an_encoding_lacks_is_no_traceback(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "XDG_STATE_HOME": str(tmp_path / "größer")}
    command = [sys.executable, "-m", "ostraca_cli", "up", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\xf6" in done.stdout


def test_too_few_threads_for_etcd_are_refused_where_its_client_would_never_answer(tmp_path: Path) -> None:
    def few() -> None:
        resource.setrlimit(resource.RLIMIT_STACK, (256 * MIB, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_AS, (2048 * MIB, resource.RLIM_INFINITY))

    etcd = ("--etcd", "127.0.0.1:1", "--files", str(tmp_path))
    command = [sys.executable, "-m", "ostraca_cli", "fabric", "create", *etcd]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30, preexec_fn=few)
    assert (done.returncode, done.stdout) == (1, "")
    assert "the etcd client needs 16 threads, and can start" in done.stderr

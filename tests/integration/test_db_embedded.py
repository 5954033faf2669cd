"""The embedded database: shared, stopped with its last user, and up again after any kill."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tandem.db import embedded, server
from tandem.db.check import check
from tandem.db.engine import connect, open_connection
from tandem.db.leases import Lease, exclusive, holders
from tandem.errors import DatabaseError, SetupError
from tandem.home import home

USER = """
import sys
from tandem.db.embedded import embedded_database
with embedded_database() as url:
    print(url, flush=True)
    sys.stdin.read()
"""


class User:
    """Another command that uses the embedded database until ``leave``."""

    def __init__(self, **popen: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", USER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **popen,  # type: ignore[call-overload]
        )

    def url(self) -> str:
        line = self.process.stdout.readline().strip()
        assert line, self.process.stderr.read()
        return line

    def leave(self) -> None:
        _, errors = self.process.communicate("")
        assert errors == ""
        assert self.process.returncode == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def made() -> Iterator[Path]:
    """A data folder in which the cluster is made once: that is most of the time of a start."""
    folder = Path(tempfile.mkdtemp(prefix="tandem-test-"))
    folder.chmod(0o755)
    with embedded.embedded_database(home=folder):
        pass
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def place(made: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TANDEM_HOME", str(made))
    yield made
    embedded.stop(force=True)


def wait_until(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition never became true"
        time.sleep(0.02)


def write(url: str, value: int) -> None:
    with open_connection(url) as conn:
        if value == 1:
            conn.execute("DROP TABLE IF EXISTS kept")
            conn.execute("CREATE TABLE kept (value int)")
        conn.execute("INSERT INTO kept VALUES (%s)", [value])


def kept(url: str) -> list[int]:
    with open_connection(url) as conn:
        return [row[0] for row in conn.execute("SELECT value FROM kept ORDER BY value")]


def test_commands_at_once_share_one_server_that_stops_with_the_last(tandem_home: Path) -> None:
    """Both begin before there is a cluster: one makes it, the other waits."""
    users = [User(), User()]
    urls = {user.url() for user in users}
    assert len(urls) == 1
    found = embedded.status()
    assert found.running
    assert found.users == sorted(user.process.pid for user in users)
    check(urls.pop())
    users[0].leave()
    assert embedded.status().running
    assert embedded.status().users == [users[1].process.pid]
    users[1].leave()
    assert not embedded.status().running


def test_it_survives_kills_of_users_postmaster_and_everything(place: Path) -> None:
    """What was committed is there after each, and no lease of a dead user keeps the server up."""
    killed = User()
    url = killed.url()
    write(url, 1)
    killed.kill()
    assert embedded.status().running
    assert embedded.status().users == []

    with embedded.embedded_database() as url:
        write(url, 2)
        os.kill(embedded.status().pid or 0, signal.SIGKILL)
        with embedded.embedded_database():
            assert kept(url) == [1, 2]
            write(url, 3)

    everything = User()
    everything.url()
    folder = place / "postgres" / "data"
    everything.kill()
    for process in psutil.process_iter():
        try:
            if process.name().startswith("postgres") and Path(process.cwd()) == folder:
                process.kill()
        except psutil.Error:
            continue
    assert (folder / "postmaster.pid").exists()
    with embedded.embedded_database() as url:
        assert kept(url) == [1, 2, 3]
    assert not embedded.status().running


def test_a_pid_file_that_names_another_process_is_no_server(place: Path) -> None:
    """After a restart of the machine the id may belong to anybody, also to the user who starts PostgreSQL."""
    with embedded.embedded_database() as url:
        write(url, 1)
    account = server._account()
    other = subprocess.Popen(
        ["/bin/sleep", "600"], **({"user": account.uid, "group": account.gid} if account.switch else {})
    )
    try:
        pid_file = place / "postgres" / "data" / "postmaster.pid"
        pid_file.write_text(f"{other.pid}\n{pid_file.parent}\n1\n5432\n\n\n\n")
        os.chown(pid_file, account.uid, account.gid)
        assert not embedded.status().running
        with embedded.embedded_database() as url:
            assert kept(url) == [1]
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_held_it_stays_until_stopped(place: Path) -> None:
    with pytest.raises(DatabaseError, match="tandem db start"):
        embedded.url()
    found = embedded.start()
    assert found.running
    assert found.held
    with embedded.embedded_database() as url:
        assert url == embedded.url()
        with pytest.raises(DatabaseError, match=f"in use by process {os.getpid()}"):
            embedded.stop()
        assert not embedded.status().held
    assert not embedded.status().running
    embedded.start()
    with embedded.embedded_database():
        pass
    assert embedded.status().running
    assert not embedded.stop().running


def test_ctrl_c_ends_the_command_and_the_server(place: Path) -> None:
    user = User(start_new_session=True)
    user.url()
    os.killpg(user.process.pid, signal.SIGINT)
    user.process.communicate()
    assert not embedded.status().running


def test_only_its_own_user_gets_in_and_nothing_listens_on_the_network(place: Path) -> None:
    with embedded.embedded_database() as url:
        pid = embedded.status().pid
        assert pid is not None
        assert psutil.Process(pid).net_connections("inet") == []
        with open_connection(url) as conn:
            assert conn.execute("SHOW fsync").fetchone() == ("on",)
        psql = server.Server(place / "postgres")._software(server._account()) / "bin" / "psql"
        mine = subprocess.run([psql, url, "-Atc", "SELECT 1"], capture_output=True, text=True, check=False)
        assert mine.stdout == "1\n"
        if os.geteuid() == 0:
            other = subprocess.run([psql, url, "-c", "SELECT 1"], stderr=subprocess.PIPE, user="nobody", check=False)
            assert b"Peer authentication failed" in other.stderr


@pytest.mark.needs("root")
@pytest.mark.filterwarnings("ignore:.*fork")  # the child uses none of the threads that other tests may have started
def test_it_works_for_an_ordinary_user_too(made: Path, tandem_home: Path) -> None:
    """In a child that gives up root after everything is imported: its Python may lie where only root can go."""
    nobody = pwd.getpwnam("nobody")
    folder = tandem_home / "of-nobody"
    folder.mkdir(mode=0o700)
    os.chown(folder, nobody.pw_uid, nobody.pw_gid)
    if (pid := os.fork()) == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(nobody.pw_gid)
            os.setuid(nobody.pw_uid)
            with embedded.embedded_database(home=folder) as url:
                check(url)
                found = embedded.status(home=folder)
                good = psutil.Process(found.pid).username() == "nobody" and found.users == [os.getpid()]
            code = 0 if good and not embedded.status(home=folder).running else 2
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.needs("root")
def test_as_root_a_closed_folder_is_named_and_the_default_one_is_not_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path / "home"))
    with ExitStack() as stack, pytest.raises(DatabaseError, match=r"cannot enter .* set TANDEM_HOME") as caught:
        stack.enter_context(embedded.embedded_database())
    assert "\n" not in str(caught.value)
    monkeypatch.delenv("TANDEM_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr("tandem.home.ROOT_HOME", tmp_path / "root")
    assert home() == tmp_path / "root"


def test_a_folder_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_HOME", "/proc/no/such/place")
    with pytest.raises(SetupError, match=r"cannot be made .* set TANDEM_HOME"):
        home()


def test_another_major_version_is_refused(place: Path) -> None:
    with embedded.embedded_database():
        pass
    version = place / "postgres" / "data" / "PG_VERSION"
    mine = version.read_text()
    version.write_text("15\n")
    with ExitStack() as stack, pytest.raises(DatabaseError, match="made by PostgreSQL 15, this is"):
        stack.enter_context(embedded.embedded_database())
    version.write_text(mine)


def test_a_long_path_gets_a_short_socket(tandem_home: Path) -> None:
    deep = tandem_home / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    with embedded.embedded_database(home=deep, upgrade=False) as url:
        engine = connect(url)
        engine.connect().close()
        engine.dispose()
        sockets = server.Server(deep / "postgres").socket_folder
        assert not sockets.is_relative_to(tandem_home)
    sockets.rmdir()


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("initdb: error: could not write file: No space left on device", "no space left .*: free some space"),
        ('FATAL:  could not open file "x": Permission denied', "not writable .*: set TANDEM_HOME"),
        ("FATAL: could not create any Unix-domain sockets\nLOG: Address already in use", "socket is in use"),
        ("LOG: x\nFATAL:  sky is falling\nLOG: y", "sky is falling: see .*log"),
        ("", "no message"),
    ],
)
def test_what_postgres_says_becomes_one_line(output: str, message: str, tmp_path: Path) -> None:
    line = server._explain(output, tmp_path, "start")
    assert re.search(message, line)
    assert "\n" not in line


def test_a_lease_ends_with_its_process(tmp_path: Path) -> None:
    script = "import sys, time\nfrom pathlib import Path\nfrom tandem.db.leases import Lease\n"
    script += "lease = Lease(Path(sys.argv[1]))\nprint('held', flush=True)\ntime.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    child.stdout.readline()
    mine = Lease(tmp_path)
    assert holders(tmp_path) == sorted([child.pid, os.getpid()])
    child.kill()
    child.communicate()
    assert holders(tmp_path) == [os.getpid()]
    mine.release()
    mine.release()
    assert holders(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_is_never_given_back_is_named(tmp_path: Path) -> None:
    with (
        exclusive(tmp_path / "lock", 1),
        pytest.raises(DatabaseError, match="another command has held"),
        exclusive(tmp_path / "lock", 0.05),
    ):
        pass
    with exclusive(tmp_path / "lock", 1):
        pass

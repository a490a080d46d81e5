"""The cluster secret: its file, and the CURVE keys that are derived from it.

One text, the same for every process of a cluster, becomes a key pair for each plane and role (HKDF with SHA-256, RFC
5869), so nothing else has to be handed around. Knows no sockets; plane_security.py puts the keys on them.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import logging
import os
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import zmq
from zmq.utils import z85

from common.errors import ConfigError

log = logging.getLogger(__name__)

Plane = Literal["control", "fetch"]
Role = Literal["server", "client"]

_NUM_RANDOM_BYTES = 32
MIN_SECRET_CHARACTERS = 43  # what 32 bytes take in base64
MAX_SECRET_CHARACTERS = 1024
_SALT = b"tandem cluster secret 1"  # another number: other keys, for a change that old and new must not mix in


@dataclass(frozen=True)
class KeyPair:
    """CURVE keys in Z85, as ZMQ takes them."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True)
class PlaneKeys:
    """Those of the side that binds and of the side that dials; both sides know both."""

    server: KeyPair
    client: KeyPair


class ClusterSecret:
    """Raises ConfigError for a text that is too short, or looks like another kind of file. Shows nothing of itself."""

    def __init__(self, text: str, origin: str = "the cluster secret") -> None:
        text = text.strip()
        if not MIN_SECRET_CHARACTERS <= len(text) <= MAX_SECRET_CHARACTERS:
            raise ConfigError(
                f"{origin} has {len(text)} characters, must have {MIN_SECRET_CHARACTERS} to {MAX_SECRET_CHARACTERS} "
                f"random ones ({_NUM_RANDOM_BYTES} bytes in base64); `tandem keygen FILE` makes one"
            )
        if not text.isascii() or not text.isprintable() or " " in text:
            raise ConfigError(
                f"{origin} is not one line of printable ASCII without spaces; `tandem keygen FILE` makes one"
            )
        self._pseudorandom_key = hmac.digest(_SALT, text.encode(), hashlib.sha256)

    def plane_keys(self, plane: Plane) -> PlaneKeys:
        return PlaneKeys(self._key_pair(plane, "server"), self._key_pair(plane, "client"))

    def _key_pair(self, plane: Plane, role: Role) -> KeyPair:
        info = f"curve/{plane}/{role}".encode()
        secret = z85.encode(hmac.digest(self._pseudorandom_key, info + b"\x01", hashlib.sha256))
        return KeyPair(zmq.curve_public(secret), secret)

    def __repr__(self) -> str:
        return "ClusterSecret(...)"


def new_secret_text() -> str:
    """Does not begin with a dash: many a command would take it for a flag."""
    text = secrets.token_urlsafe(_NUM_RANDOM_BYTES)
    return new_secret_text() if text.startswith("-") else text


def load_cluster_secret(path: Path) -> ClusterSecret:
    """Raises ConfigError when it cannot be read or used; warns when every user of the machine can read it."""
    origin = f"--cluster-secret-file {path}" if _may_be_shown(path) else "the file named by --cluster-secret-file"
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # a pipe would keep us waiting for its writer
            raise OSError(errno.EINVAL, "Not a regular file")
        with path.open("rb") as file:
            content = file.read(4 * MAX_SECRET_CHARACTERS)
    except OSError as error:
        raise ConfigError(f"{origin} cannot be read: {error.strerror}; `tandem keygen FILE` makes one") from None
    if mode & stat.S_IRWXO:
        log.warning("%s is open to every user of this machine (mode %04o); `chmod 600` it", origin, stat.S_IMODE(mode))
    return ClusterSecret(content.decode("ascii", "replace"), origin)


def _may_be_shown(path: Path) -> bool:
    """Not what may be the secret itself, given in place of its file."""
    if len(str(path)) < MIN_SECRET_CHARACTERS or os.path.lexists(path):
        return True
    return len(path.name) < MIN_SECRET_CHARACTERS and path.parent.is_dir()

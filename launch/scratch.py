"""The directory in /tmp of a launcher, and what launchers that were killed have left there."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX, _OWNER = "megalite_", "owner"


@contextmanager
def scratch() -> Iterator[Path]:
    """A directory of this process, gone at the end; those whose process is dead go first."""
    # The path of the forkserver's socket, which lies in it, must stay under 108 bytes.
    place = Path("/tmp" if len(os.fsencode(tempfile.gettempdir())) > 48 else tempfile.gettempdir())
    remove_left(place)
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=place) as name:
        with open(Path(name, "new"), "wb") as owner:
            # The kernel gives the lock back when this process ends. The file has its name only
            # when it is locked, so that nobody takes us for dead in between.
            with suppress(OSError):
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.rename(owner.name, Path(name, _OWNER))
            yield Path(name)


def remove_left(place: Path) -> None:
    """Remove the directories of this user's launchers that were killed."""
    with suppress(OSError):
        for path in place.glob(f"{_PREFIX}*"):
            if _is_ours(path) and _is_free(path / _OWNER):
                shutil.rmtree(path, ignore_errors=True)


def _is_ours(path: Path) -> bool:
    """Whether it is a real directory, no link, of this user."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def _is_free(owner: Path) -> bool:
    """Whether there is such a file, and no living process has locked it."""
    try:
        descriptor = os.open(owner, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True

"""One process a folder: two that write into the same one would move and delete each other's files."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from lowtide.errors import ConfigError

_NAME = ".in-use"


@contextmanager
def alone_in(folder: Path, key: str) -> Iterator[None]:
    """No other process of ours writes into ``folder`` meanwhile; one that was killed counts for nothing.

    key: that names the folder in a configuration. Raises ConfigError where one does already.
    """
    path = folder / _NAME
    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise ConfigError(
            f"{key}: another process of lowtide is writing into {folder}. Wait until it is done, stop it, or choose "
            f"another folder (--set {key}=…)"
        ) from None
    except (OSError, NotImplementedError):  # a file system without locks
        yield
        return
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()
        lock.release()

"""The errors that lowtide raises, one class per thing that a caller can do about it.

Each carries the exit code that the command line returns for it: 1 a check failed, 2 wrong usage or
configuration, 3 the machine failed (disk, memory, device).
"""


class LowtideError(Exception):
    """Base class of every error that lowtide raises on purpose."""

    exit_code = 1


class ConfigError(LowtideError, ValueError):
    """A wrong key, value or file: names what was wrong, what is allowed and what to do."""

    exit_code = 2


class UnsupportedError(ConfigError):
    """The model cannot run the scope that was asked for; names the model and the scopes that it has."""


class ReplayError(LowtideError, RuntimeError):
    """Recomputation cannot give the forward's values: names the block and the likely causes."""


class MachineError(LowtideError, RuntimeError):
    """The machine failed: disk full, memory or device gone. Nothing that was saved before is touched."""

    exit_code = 3

"""The package's own exceptions; all others are Python's."""

from lazyllm._core import CheckpointError, DeviceError

__all__ = ["CheckpointError", "DeviceError"]

"""The paper's tables and figures, for any checkpoint."""

from lazyllm.reproduce.reproduction import reproduce

__all__ = ["reproduce"]

"""pandas, an optional package, imported where a frame is made."""

from __future__ import annotations

from typing import Any


def pandas() -> Any:
    try:
        import pandas
    except ImportError:
        raise ImportError("to_frame needs pandas: pip install 'lazyllm-engine[longbench]'") from None
    return pandas

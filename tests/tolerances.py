"""How far the engine may be from the float64 reference: the one place where tolerances are written.

The engine computes in float32 whatever the stored type of the weights, and the reference is given exactly
the stored values.
"""

from __future__ import annotations

import numpy as np

LOGITS = {"F32": 1e-5, "BF16": 1e-5, "F16": 1e-5}
SCORES = {"F32": 1e-5, "BF16": 1e-5, "F16": 1e-5}
HALF_LOGITS = {
    "BF16": 0.05,
    "F16": 0.006,
}  # where activations have 16 bits too, as on CUDA: about six units of their precision
NEAR_TIE = 2e-5  # selections closer than this may go either way in float32


def error(got: np.ndarray, want: np.ndarray) -> float:
    """The largest difference, as a share of the largest entry."""
    return float(np.abs(np.asarray(got, np.float64) - want).max() / np.abs(want).max())

"""All tolerances between the engine and the float64 reference.

The engine computes in float32 for every stored type of weights, and the reference uses exactly the stored
values.
"""

import numpy as np

LOGITS = {"F32": 1e-5, "BF16": 1e-5, "F16": 1e-5}
SCORES = {"F32": 1e-5, "BF16": 1e-5, "F16": 1e-5}
# if activations also have 16 bits, as on CUDA: about six units of that type's precision
HALF_LOGITS = {"BF16": 0.05, "F16": 0.006}
INT8_LOGITS = 0.05  # if activations and weights have 8 bits
KV_LOGITS = 5e-4  # if K and V have 16 bits: float32 sums may round a few of them the other way
NEAR_TIE = 2e-5  # relative gap of scores below which float32 rounding may change a selection
KV_NEAR_TIE = 2e-3  # the same, if K and V have 16 bits


def error(got: np.ndarray, want: np.ndarray) -> float:
    """The largest absolute difference divided by the largest absolute value of `want`, unless all are 0."""
    return float(np.abs(np.asarray(got, np.float64) - want).max() / (np.abs(want).max() or 1.0))

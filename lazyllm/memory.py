"""Memory: what a context needs, and what this process may still take."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lazyllm.config import ModelConfig

MEMINFO = "/proc/meminfo"
GROUP_LIMIT, GROUP_USE = "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"
FLOAT_BYTES = 4
BOOKKEEPING_BYTES = 56  # ids, kinds, depths, flags, sets, scores and their order, of one token
ROW_CHUNK = 1024  # rows that go through the FFN together
FEW_PRODUCT_ROWS, FEW_ROWS, KEY_CHUNKS = 160, 64, 16  # of the CPU's room for passes over few tokens


def session_bytes(config: ModelConfig, n_tokens: int) -> int:
    """Bytes of a session of `n_tokens`: keys and values of all layers, Aux rows, one pass's working room."""
    heads = config.n_heads + 2 * config.n_kv_heads
    caches = 2 * config.n_layers * config.n_kv_heads * config.head_dim + config.hidden + config.head_dim
    working = 2 * config.hidden + (heads + config.n_heads) * config.head_dim + config.n_heads
    ffn = ROW_CHUNK * (config.hidden + config.ffn) + min(n_tokens, FEW_PRODUCT_ROWS) * 2 * config.ffn
    chunks = min(n_tokens, FEW_ROWS) * config.n_heads * KEY_CHUNKS * (config.head_dim + 2)
    fixed = FLOAT_BYTES * (ffn + chunks + config.vocab)
    return n_tokens * (FLOAT_BYTES * (caches + working) + BOOKKEEPING_BYTES) + fixed


def available_bytes() -> int | None:
    """What the machine, or the process's control group, has left; None where the system does not say."""
    left = []
    try:
        with open(MEMINFO) as file:
            left += [int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:")]
        with open(GROUP_LIMIT) as limit, open(GROUP_USE) as use:
            if (most := limit.read().strip()) != "max":
                left.append(max(0, int(most) - int(use.read())))
    except (OSError, ValueError):
        pass
    return min(left, default=None)


def check_memory(config: ModelConfig, n_tokens: int) -> None:
    """MemoryError when the buffers of a session of `n_tokens` tokens are more than there is."""
    asked, available = session_bytes(config, n_tokens), available_bytes()
    if available is not None and asked > available:
        raise MemoryError(
            f"a session of {n_tokens} tokens needs {asked} bytes ({asked / 2**30:.2f} GiB); "
            f"{available} ({available / 2**30:.2f} GiB) are available"
        )

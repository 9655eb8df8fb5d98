"""The estimate of memory by which a session refuses to start, and the memory that there is."""

import re
import resource
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import SANITIZED

import lazyllm
from benchmarks.measuring.models import ModelShape, write_model
from benchmarks.measuring.process import Process
from benchmarks.suites.memory import STATUS, Probe, bytes_in, largest_context
from lazyllm import Pruning
from lazyllm.machine import memory

SHAPE = ModelShape("small", n_layers=8, hidden=128, n_heads=4, n_kv_heads=4, head_dim=64, ffn=256)
VOCAB, TOKENS = 1000, 8192
GIB = 1 << 30


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory") / "small"
    write_model(folder, SHAPE, VOCAB, TOKENS)
    return folder


@pytest.mark.skipif(SANITIZED, reason="a sanitizer takes memory of its own")
def test_the_estimate_is_what_weights_and_a_dense_session_take(small: Path) -> None:
    with Process(Probe, small, environment={}) as probe:
        probe.call("growth", [i % VOCAB for i in range(TOKENS)])
        peak, estimates = probe.call("peak"), probe.call("estimates", TOKENS)
    assert peak == pytest.approx(sum(estimates), rel=0.05)


class Sparse(Probe):
    def growths(self, ids: list[int], pruning: Pruning) -> list[int]:
        """Resident bytes of a session after these tokens, and after one that makes its buffers grow."""
        before, session = bytes_in(STATUS, "VmRSS"), self._llm.session(pruning)
        session.core.reserve(len(ids))
        grown = []
        for tokens in (ids, [1]):
            session.forward(tokens, generated=tokens is not ids)
            grown.append(bytes_in(STATUS, "VmRSS") - before)
        return grown


@pytest.mark.skipif(SANITIZED, reason="a sanitizer's shadow memory counts as resident")
def test_pruned_tokens_take_no_room_in_the_cache(tmp_path: Path) -> None:
    """With 1 % of the tokens kept after the first layer, less than half of all K,V slots become resident."""
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not huge.exists() or "[never]" in huge.read_text():
        warnings.warn("huge pages are off here, so that this test cannot fail", stacklevel=1)
    shape = ModelShape("deep", n_layers=24, hidden=64, n_heads=4, n_kv_heads=4, head_dim=64, ffn=64)
    write_model(tmp_path / "deep", shape, 100, 2 * TOKENS)
    with Process(Sparse, tmp_path / "deep", environment={}) as probe:
        grown = probe.call("growths", [i % 100 for i in range(TOKENS)], Pruning({0: 0.01}))
    assert max(grown) < 24 * (2 * 4 * 64 * 4 * TOKENS) / 2


def test_weights_are_mapped_with_huge_pages_where_the_file_system_has_them(tmp_path: Path) -> None:
    write_model(tmp_path / "wide", replace(SHAPE, ffn=1024), VOCAB, TOKENS)
    llm = lazyllm.load(tmp_path / "wide", device="cpu")
    maps = Path("/proc/self/smaps").read_text()
    (flags,) = re.findall(rf"{tmp_path}/wide/\S*safetensors\n.*?VmFlags:([^\n]*)", maps, re.DOTALL)
    assert "hg" in flags.split() or not Path("/sys/kernel/mm/transparent_hugepage").exists()
    del llm


class Faults(Probe):
    def pages(self, ids: list[int]) -> int:
        """Pages of memory that the process gets from the system for a new session."""
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        self._llm.session().forward(ids)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(SANITIZED, reason="memory is not used again there, so that a use after its end is found")
def test_a_session_uses_the_memory_of_the_one_before(small: Path) -> None:
    with Process(Faults, small, environment={}) as probe:
        first, second = (probe.call("pages", [*range(VOCAB)]) for _ in range(2))
    assert second < first / 10


def test_the_largest_context(small: Path) -> None:
    llm = lazyllm.load(small, device="cpu")
    core = llm.session().core
    for tokens in (1, 1000, TOKENS):
        enough = llm.core.bytes + core.bytes_for(tokens)
        assert largest_context(llm, enough) == tokens
        assert largest_context(llm, enough - 1) == tokens - 1
    assert largest_context(llm, 1 << 40) == TOKENS


@pytest.mark.parametrize(
    ("own", "limits", "left"),
    [
        ("", {}, 8 * GIB),  # no groups: what the machine has
        ("0::/\n", {"": (2 * GIB, GIB // 2)}, 3 * GIB // 2),  # a container has its limit at the root
        ("1:cpu:/else\n0::/service/unit\n", {"service": (3 * GIB, 2 * GIB), "service/unit": ("max", GIB)}, GIB),
        ("0::/unit\n", {"unit": (64 * GIB, GIB)}, 8 * GIB),  # a limit above the machine
        ("0::/unit\n", {"unit": (4 * GIB, 4 * GIB, 3 * GIB)}, 3 * GIB),  # cached files can be dropped
        ("0::/../other\n", {"": (GIB, 0)}, GIB),  # a group that a container does not see
    ],
)
def test_the_group_that_leaves_least_counts(
    own: str, limits: dict[str, tuple[Any, ...]], left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In false files of the system, by group: its limit, use and cached pages."""
    for name in ("MEMINFO", "GROUP", "GROUPS"):
        monkeypatch.setattr(memory, name, tmp_path / name)
    (tmp_path / "MEMINFO").write_text(f"MemTotal: {16 * GIB >> 10} kB\nMemAvailable: {8 * GIB >> 10} kB\n")
    (tmp_path / "GROUP").write_text(own)
    for group, (most, used, *cached) in limits.items():
        place = tmp_path / "GROUPS" / group
        place.mkdir(parents=True, exist_ok=True)
        (place / "memory.max").write_text(f"{most}\n")
        (place / "memory.current").write_text(f"{used}\n")
        (place / "memory.stat").write_text(f"anon 5\ninactive_file {sum(cached)}\nactive_file 0\nslab 7\n")
    assert memory.available_bytes() == left


def test_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MEMINFO", "GROUP", "GROUPS"):
        monkeypatch.setattr(memory, name, tmp_path / "missing")
    assert memory.available_bytes() is None
    memory.check_memory(1 << 62, "this")


def test_weights_that_do_not_fit_when_rounded_are_refused(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = lazyllm.load(small, device="cpu", weights="q8").core.bytes
    monkeypatch.setattr(memory, "available_bytes", lambda: needed // 2)
    with pytest.raises(MemoryError, match=r"with weights='q8' needs \d+ bytes"):
        lazyllm.load(small, device="cpu", weights="q8")
    lazyllm.load(small, device="cpu")

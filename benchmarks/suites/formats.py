"""Suite `formats`: prefill and decoding with weights of each format, against llama.cpp with the same file."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.measuring import goals
from benchmarks.measuring.ceilings import Ceilings
from benchmarks.measuring.place import Place
from benchmarks.measuring.process import Process
from benchmarks.measuring.report import Figure, Row, Section
from benchmarks.measuring.rounds import Contestant, Times, in_turn, timed
from benchmarks.options import Options
from benchmarks.peers.engines import (
    LLAMA_CPP,
    OURS,
    TRANSFORMERS,
    TRANSFORMERS_DTYPES,
    llama_cpp_peer,
    transformers_peer,
)
from benchmarks.peers.gguf_file import gguf_file
from benchmarks.suites.decode import STEPS, arithmetics, peer_steps, step_bytes, steps
from benchmarks.suites.prefill import read
from lazyllm.checkpoints.config import ModelConfig
from lazyllm.checkpoints.pypi_models import default_cache
from lazyllm.llm import LLM
from lazyllm.machine.device import chosen_compute

FORMATS = ("BF16", "Q8_0", "Q4_0", "Q4_K")
BLOCK_OF_K = 256  # values; the rows of a matrix are a multiple of them
TOKENS, QUICK_TOKENS = 1024, 128
PREFILL, DECODE, READ = "prefill", "decode step", "decode, of read ceiling"
RATIOS = {PREFILL: "prefill / ours", DECODE: "decode / ours"}
GOALS = {
    "llama.cpp": {RATIOS[PREFILL]: goals.PREFILL_FORMAT, RATIOS[DECODE]: goals.DECODE_FORMAT},
    "transformers bf16": {RATIOS[PREFILL]: goals.PREFILL_BF16},
}


@dataclass(frozen=True)
class Subject:
    """A checkpoint; or, of a shape, one of several layers and one of a single layer. Their difference gives
    the time of a layer: engines differ in how much of the last layer they compute."""

    name: str
    cache: Path  # of its GGUF files
    folders: tuple[Path, ...]
    layers: int = 1

    def of_layer(self, values: Sequence[float]) -> float:
        """The value of the whole checkpoint or of one layer, from those of each folder."""
        return values[0] if len(values) == 1 else (values[0] - values[1]) / (self.layers - 1)

    def time(self, times: Sequence[Times]) -> Times:
        rounds = zip(*(folder.seconds for folder in times), strict=True)
        return Times(tuple(map(self.of_layer, rounds)))


class Ours:
    """A model of ours; its decode steps go on after its last prefill."""

    def __init__(self, llm: LLM, ids: list[int], new: list[int]) -> None:
        self._llm, self._ids, self._new = llm, ids, new
        self._session = llm.session()
        self.prefill = timed(self._read)

    def _read(self) -> None:
        self._session = read(self._llm, self._ids)

    def decode(self) -> float:
        return steps(self._session, self._new)()

    def step_bytes(self) -> int:
        return step_bytes(self._llm, self._session.last_pass)


def formats(options: Options) -> Iterator[Section]:
    return of_subject(options, Subject(options.config.name, default_cache() / "bench", (options.folder,)))


def of_subject(options: Options, subject: Subject) -> Iterator[Section]:
    for place in options.places:
        for kind in FORMATS if LLAMA_CPP in options.peers else FORMATS[:1]:
            yield section(options, subject, kind, place)


def section(options: Options, subject: Subject, kind: str, place: Place) -> Section:
    """Every engine has the same weights; ours computes with them in each arithmetic of this processor."""
    title = f"Weights in {kind}, {subject.name}, {place}"
    config = ModelConfig.from_folder(subject.folders[0])
    if kind.endswith("_K") and config.hidden % BLOCK_OF_K:
        why = f"rows of {config.hidden} values are no multiple of a block's {BLOCK_OF_K}"
        return Section(title, [], (f"Left out: {why}.",))
    n = QUICK_TOKENS if options.quick else TOKENS
    random = np.random.default_rng(n)
    ids, new = (random.integers(0, config.vocab, count).tolist() for count in (n, STEPS))
    context, places = n + STEPS * (options.rounds + 1), range(len(subject.folders))
    ours: dict[str, list[Ours]] = {f"{OURS} {compute}": [] for compute in arithmetics("f32", "bf16", "int8")}
    prefills: dict[str, Contestant] = {}
    decodes: dict[str, Contestant] = {}
    with ExitStack() as stack:
        for number, folder in enumerate(subject.folders):
            file = gguf_file(folder, kind, subject.cache) if LLAMA_CPP in options.peers else folder
            for name, models in ours.items():
                model = Ours(place.load(file, compute=name.removeprefix(f"{OURS} ")), ids, new)
                models.append(model)
                prefills[f"{name} {number}"], decodes[f"{name} {number}"] = model.prefill, model.decode
            for name, peer in peers(options, folder, file, kind, context, place):
                process = stack.enter_context(peer)
                prefills[f"{name} {number}"] = process.seconds("prefill", ids)
                decodes[f"{name} {number}"] = peer_steps(process.seconds("decode", new))
        ceilings = Ceilings(place)
        phases = {PREFILL: in_turn(prefills, options.rounds, f"prefill, {title}")}
        phases[DECODE] = in_turn({**ceilings.both, **decodes}, options.rounds, f"decode, {title}")

    def taken(name: str, phase: str) -> Times:
        return subject.time([phases[phase][f"{name} {number}"] for number in places])

    fastest = f"{OURS} {chosen_compute('fastest', place.device)}"
    rows = []
    for name in dict.fromkeys(name.rpartition(" ")[0] for name in prefills):
        figures: dict[str, Figure] = {phase: taken(name, phase) for phase in phases}
        if name in ours:
            n_bytes = subject.of_layer([model.step_bytes() for model in ours[name]])
            rate = n_bytes / taken(name, DECODE).median
            figures[READ] = rate / ceilings.bandwidth(phases[DECODE])
        for phase, ratio in RATIOS.items():
            figures[ratio] = taken(name, phase).median / taken(fastest, phase).median
        keys = {"engine": name, "format": kind, "model": subject.name, **place.keys}
        rows.append(Row(name, figures, GOALS.get(name, {}), keys))
    note = f'{n} tokens of prompt, then decode steps. Ratios are to ours with compute="fastest".'
    return Section(title, rows, (note,))


def peers(
    options: Options, folder: Path, file: Path, kind: str, context: int, place: Place
) -> Iterator[tuple[str, AbstractContextManager[Process]]]:
    if LLAMA_CPP in options.peers:
        yield LLAMA_CPP, llama_cpp_peer(file, context, place)
    if TRANSFORMERS in options.peers and kind == FORMATS[0]:
        for title, dtype in TRANSFORMERS_DTYPES.items():
            yield title, transformers_peer(folder, dtype, place)

"""Engines: the model in lazyllm and in its peers, each in the same place."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType

from lazyllm.bench.options import Options
from lazyllm.bench.peers import (
    LLAMA_CPP,
    TRANSFORMERS,
    TRANSFORMERS_DTYPES,
    llama_cpp_peer,
    transformers_peer,
)
from lazyllm.bench.place import Place
from lazyllm.bench.process import Process

OURS = "lazyllm"
LLAMA_CPP_F16 = "llama.cpp F16"
CHOOSING_TOKENS = 2048


class Engines:
    """To be used with `with`. `notes` say who is missing and why, and how the others were set up."""

    def __init__(self, options: Options, place: Place, context: int) -> None:
        self.llm = place.load(options.folder)
        self.peers: dict[str, Process] = {}
        self.notes: list[str] = []
        self._stack = ExitStack()
        for name in options.peers:
            try:
                if name == TRANSFORMERS:
                    peer = transformers_peer(options.folder, TRANSFORMERS_DTYPES[place.transformers], place)
                    self.peers[place.transformers] = self._stack.enter_context(peer)
                elif name == LLAMA_CPP:
                    peer = self._stack.enter_context(llama_cpp_peer(options.folder, context, place))
                    batch = peer.call("choose_batch", options.prompt(min(context, CHOOSING_TOKENS)))
                    self.peers[LLAMA_CPP_F16] = peer
                    self.notes.append(f"llama.cpp took {batch} tokens at once, the faster of its settings.")
            except (RuntimeError, ValueError, OSError) as error:
                self.notes.append(f"**{name} is left out: {error}**")
            except BaseException:
                self._stack.close()
                raise

    def __enter__(self) -> Engines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

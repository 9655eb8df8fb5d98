"""OpenVINO as a peer: a stateful model that optimum-intel has exported, with logits of the last row only."""

import time
from pathlib import Path
from typing import Any

import numpy as np

from lazyllm.checkpoints.checkpoint import Checkpoint

MODEL = "openvino_model.xml"
EXPORT = "optimum-cli export openvino --task text-generation-with-past"
END = np.iinfo(np.int64).max


def exported(folder: Path, cache: Path) -> Path:
    """The folder in `cache` of the checkpoint's export, which optimum-intel writes in an environment of its own."""
    target = cache / f"{Checkpoint(folder).weights_digest(progress=False)[:16]}.openvino"
    if not (target / MODEL).is_file():
        raise ValueError(
            f"optimum-intel, in an environment of its own, makes its model: {EXPORT} --model {folder} {target}"
        )
    return target


class OpenVinoPeer:
    """Runs the export in `folder` with products in `precision`, "f32" or "bf16", and OpenVINO's own KV cache."""

    def __init__(self, folder: Path, precision: str, threads: int) -> None:
        import openvino

        model: Any = openvino.Core().read_model(folder / MODEL)
        keep_last_row(model)
        settings = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": threads}
        self._request: Any = openvino.compile_model(model, "CPU", settings).create_infer_request()
        self._length = 0

    def _run(self, ids: list[int]) -> None:
        first, self._length = self._length, self._length + len(ids)
        self._request.infer(
            {
                "input_ids": np.array([ids], np.int64),
                "attention_mask": np.ones((1, self._length), np.int64),
                "position_ids": np.arange(first, self._length, dtype=np.int64)[None],
                "beam_idx": np.zeros(1, np.int32),
            }
        )

    def prefill(self, ids: list[int]) -> float:
        """Seconds from token ids to the logits of the last one, with an empty KV cache."""
        self._request.reset_state()
        self._length = 0
        started = time.perf_counter()
        self._run(ids)
        return time.perf_counter() - started

    def decode(self, ids: list[int]) -> float:
        """Seconds of one decode step per token, appended to the current context."""
        started = time.perf_counter()
        for token in ids:
            self._run([token])
        return time.perf_counter() - started

    def logits(self, ids: list[int]) -> np.ndarray:
        self.prefill(ids)
        return np.asarray(self._request.get_tensor("logits").data[0, -1]).copy()


def keep_last_row(model: Any) -> None:
    """Cuts all rows but the last one off in front of the LM head, as OpenVINO's own pipelines do."""
    from openvino import opset13

    head = model.output("logits").node
    while head.get_type_name() != "MatMul":
        head = head.input_value(0).get_node()
    row = opset13.slice(head.input_value(0), *(np.array([bound]) for bound in (-1, END, 1, 1)))
    head.input(0).replace_source_output(row.output(0))
    model.validate_nodes_and_infer_types()

"""GemFilter: an early layer chooses the tokens that the model then reads from its first layer on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import numpy as np

from lazyllm.methods.one_stage import OneStage
from lazyllm.policy import Policy, View
from lazyllm.pruning import DENSE, layer_flops
from lazyllm.support import checked
from lazyllm.support.pooling import pooled

if TYPE_CHECKING:
    from lazyllm.checkpoints.config import ModelConfig

NEIGHBOURS = 5


@dataclass(frozen=True)
class GemFilter(OneStage):
    """Runs the layers up to `layer`, then the whole model densely on `ceil(keep * N)` tokens of the prompt.

    These are the tokens whose keys in `layer` have the largest products with the last token's queries, in
    order, at consecutive positions (Shi et al. 2024). Each prompt of a conversation is filtered by itself.
    """

    name: ClassVar[str] = "gemfilter"

    def kept(self, n_prompt: int) -> int:
        return math.ceil(self.keep * n_prompt)

    def check_length(self, config: ModelConfig, n_prompt: int) -> None:
        if n_prompt > config.context:
            raise ValueError(
                f"GemFilter reads the whole prompt first: its {n_prompt} tokens are more than the model's "
                f"context of {config.context}"
            )

    def ids(self, llm: Any, prompt_ids: list[int], turn: int) -> list[int]:
        if self.kept(len(prompt_ids)) == len(prompt_ids):
            return prompt_ids
        self.check_length(llm.config, len(prompt_ids))
        try:
            llm.session(FirstPass({self.layer: self.keep})).forward(prompt_ids, progress=False)
        except Chosen as chosen:
            return [prompt_ids[i] for i in chosen.positions]
        raise AssertionError("the first pass has run past its layer")

    def flops(self, config: ModelConfig, n_prompt: int) -> int:
        """Counted operations of both passes, as `Pruning.flops` counts, scores included."""
        self.check(config)
        n_prompt = checked.whole(n_prompt, "n_prompt", 1)
        return self._first_flops(config, n_prompt) + DENSE.flops(config, self.kept(n_prompt))

    def prefill_flops(self, config: ModelConfig, n_prompt: int, last_pass: np.ndarray) -> int:
        return self._first_flops(config, n_prompt) + DENSE.prefill_flops(config, n_prompt, last_pass)

    def _first_flops(self, config: ModelConfig, n_prompt: int) -> int:
        if self.kept(n_prompt) == n_prompt:
            return 0
        layers = sum(layer_flops(config, layer, n_prompt, n_prompt) for layer in range(self.layer + 1))
        return layers + n_prompt * 2 * config.n_heads * config.head_dim


class Chosen(Exception):
    """Ends the first pass."""

    def __init__(self, positions: np.ndarray) -> None:
        self.positions = positions


class FirstPass(Policy):
    """GemFilter's choice; nothing above its layer is run."""

    def score(self, view: View) -> NoReturn:
        keys = view.keys()
        heads = view.queries()[:, 0]
        by_kv_head = heads.reshape(len(keys), -1, heads.shape[-1]).sum(axis=1)
        scores = pooled(np.einsum("gd,gmd->m", by_kv_head, keys), NEIGHBOURS)
        if not np.isfinite(scores).all():
            raise ValueError(f"GemFilter: a score of layer {view.layer} is no finite number")
        assert view.n_keep is not None
        raise Chosen(np.sort(np.argsort(-scores, kind="stable")[: view.n_keep]))

"""Public training objectives of Qwen3-TTS over the published class, for public_objectives.py.

Each is written from its description: https://github.com/QwenLM/Qwen3-TTS (`finetuning/sft_12hz.py` at 680d4e9 and
022e286, pull request 278, issue 371) and https://github.com/modelscope/ms-swift (pull requests 9721 and 9752).

Shapes: B clips, S rows, F frames, T frames of a clip, K codebooks, J = K - 1, C hidden size, V codes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from objective_subjects import BOOKS, CODES, SPREAD, TEXT, Losses
from published_models import (
    ModelSize,
    embed_qwen3_tts,
    load_policy,
    padded_rows,
    published_class,
    write_model,
)
from torch import Tensor, nn
from torch.nn import functional

from audiollm.families.logprobs.token_figures import TokenRequest
from audiollm.supervised.guards.trials import spoken_prompt

SIZE = ModelSize(BOOKS, CODES, 64, 2, 32, 2, SPREAD)
PREDICTOR_WEIGHT = 0.3
IGNORED = -100


@dataclass(frozen=True)
class TalkerObjective:
    """How an objective differs from what generation computes."""

    name: str
    is_talker_shifted: bool = False
    """The labels are shifted by the caller, and by the class once more."""
    is_predictor_shifted: bool = False
    """The predictor's labels, one of each head, are shifted by the class's loss."""
    reads_frame: bool = False
    """The predictor reads the hidden state of the frame itself, which has consumed its codes."""
    projects_text: bool = True
    trains_predictor: bool = True


RIGHT = TalkerObjective("ours")
OBJECTIVES = (
    TalkerObjective("official script before 022e286", True, True, projects_text=False),
    TalkerObjective("official script since 022e286", True, True, reads_frame=True, projects_text=False),
    TalkerObjective("pull request 278 alone", reads_frame=True),
    TalkerObjective("pull request 278 with the mend of issue 371"),
    TalkerObjective("ms-swift before 9752", is_predictor_shifted=True, trains_predictor=False),
    TalkerObjective("ms-swift 4.6.0"),
    RIGHT,
)


def subjects(folder: Path) -> list[Callable[[], PublishedTalker]]:
    """The objectives in the order of the table, each over the same random weights."""
    model = write_model("qwen3_tts", folder / "model", SIZE)
    return [
        partial(OurTalker if objective is RIGHT else PublishedTalker, model, objective)
        for objective in OBJECTIVES
    ]


class PublishedTalker:
    """A `Subject`: the published class under one of its public objectives."""

    name = "Qwen3-TTS"

    def __init__(self, folder: Path, objective: TalkerObjective) -> None:
        self.objective, self._objective = objective.name, objective
        self._policy = load_policy(folder)
        self._peer: Any = published_class("qwen3_tts", folder, self._policy.root.model).train()
        ids = self._policy._kind.text.marked_ids
        self._ids_1S = torch.tensor(
            [ids(f"<|im_start|>assistant\n{TEXT}<|im_end|>\n<|im_start|>assistant\n")]
        )

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """See `Subject.parameters`."""
        return list(self._policy.root.model.parameters())

    def losses(self, clips: Sequence[Tensor]) -> Losses:
        """See `Subject.losses`."""
        objective, rows = self._objective, self._rows(clips)
        output = self._through_talker(rows, objective.projects_text, objective.is_talker_shifted)
        logits_FJV, loss = self._through_predictor(rows, output, objective.reads_frame)
        if not objective.is_predictor_shifted:
            codes_FJ = _codes_of(rows)[:, 1:]
            loss = functional.cross_entropy(logits_FJV.flatten(0, 1), codes_FJ.flatten())
        total = output.loss + PREDICTOR_WEIGHT * loss * objective.trains_predictor
        return Losses(total, output.loss.detach(), loss.detach())

    def frame_logits(self, clip_KT: Tensor, as_generated: bool) -> Tensor:
        """See `Subject.frame_logits`."""
        objective, rows = RIGHT if as_generated else self._objective, self._rows([clip_KT])
        output = self._through_talker(rows, objective.projects_text, False)
        rest_TJV, _ = self._through_predictor(rows, output, objective.reads_frame)
        is_frame_S = rows["labels"][0, :, 1] != IGNORED
        first_TV = output.logits[0, :-1][is_frame_S[1:]][:, :CODES]
        return torch.cat([first_TV[:, None], rest_TJV], dim=1)

    def speak(self, limit: int) -> Tensor:
        """See `Subject.speak`; of so many steps the last one gives no frame."""
        codes, _ = self._peer.eval().generate(
            input_ids=[self._ids_1S], languages=["auto"], non_streaming_mode=True, max_new_tokens=limit + 1,
            repetition_penalty=1.0, do_sample=False, subtalker_dosample=False,
        )  # fmt: skip
        codes_KT: Tensor = codes[0].T
        return codes_KT

    def _rows(self, clips: Sequence[Tensor]) -> dict[str, Tensor]:
        encoded = [rows for clip_KT in clips for rows in self._policy.encode(spoken_prompt(TEXT, clip_KT))]
        return padded_rows(encoded)

    def _through_talker(self, rows: dict[str, Tensor], projects_text: bool, is_shifted: bool) -> Any:
        labels_BS = rows["labels"][..., 0]
        if is_shifted:
            labels_BS = functional.pad(labels_BS[:, 1:], (0, 1), value=IGNORED)
        return self._peer.talker(
            inputs_embeds=embed_qwen3_tts(self._peer, rows, projects_text), attention_mask=rows["mask"],
            labels=labels_BS, output_hidden_states=True, use_cache=False,
        )  # fmt: skip

    def _through_predictor(
        self, rows: dict[str, Tensor], output: Any, reads_frame: bool
    ) -> tuple[Tensor, Tensor]:
        """Logits `[F, J, V]`, and the loss that the class makes of them."""
        is_frame_BS = rows["labels"][..., 1] != IGNORED
        hidden_BSC = output.hidden_states[0][-1]
        hidden_FC = hidden_BSC[is_frame_BS] if reads_frame else hidden_BSC[:, :-1][is_frame_BS[:, 1:]]
        logits_FJV, loss = self._peer.talker.forward_sub_talker_finetune(_codes_of(rows), hidden_FC)
        return logits_FJV, loss


class OurTalker(PublishedTalker):
    """Our own objective, over our own model, which shares its tensors with the class."""

    def losses(self, clips: Sequence[Tensor]) -> Losses:
        """See `Subject.losses`."""
        encoded = [rows for clip_KT in clips for rows in self._policy.encode(spoken_prompt(TEXT, clip_KT))]
        batch = self._policy.batch(encoded)
        logprobs = self._policy.answer_logprobs(self._policy.root, batch, TokenRequest(reference=False))
        assert logprobs.codebook_T is not None
        is_first_T = logprobs.codebook_T == 0
        first, rest = -logprobs.policy_T[is_first_T].mean(), -logprobs.policy_T[~is_first_T].mean()
        assert self._policy.depth_weight is not None
        return Losses(first + self._policy.depth_weight * rest, first.detach(), rest.detach())


def _codes_of(rows: dict[str, Tensor]) -> Tensor:
    """Codes `[F, K]` of all frames."""
    labels_BSK = rows["labels"]
    return labels_BSK[labels_BSK[..., 1] != IGNORED]

"""What is told of CSM: its prompt is turns of `[speaker]text` and frames, each with an end.

    <|begin_of_text|>[0]Hello there.<|end_of_text|> frame frame ... end   <|begin_of_text|>[1]Hi.<|end_of_text|> ...

The row before a frame chooses it; the last row of a text chooses the first. The end is a frame of zeros, and so has
targets in all codebooks. Source: the chat template of transformers' `convert_csm.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from audiollm.data.text.tokenizer import read_text_tokenizer
from audiollm.errors import ConfigError
from audiollm.families.csm.model import TIED, CsmTalker
from audiollm.families.talkers.kind import PromptRows, SpeakingText, TalkerKind, TalkerSampling
from audiollm.families.talkers.rows import SpeechRows, SpeechTargets, frame_rows, join_rows, text_rows
from audiollm.families.talkers.turns import SpeechPrompt, draw_shares
from audiollm.files.json_files import read_json_file
from audiollm.generation.engine.sampling import SamplingConfig
from audiollm.models.generation_config import FILE_NAME as GENERATION_FILE
from audiollm.models.pretrained import StoredWeights
from audiollm.train.settings import PromptMix

ANY_SPEAKER = "0"
"""The speaker of a text that names none."""


class CsmKind(TalkerKind):
    """See `TalkerKind`."""

    model_type = "csm"
    depth_weight = 1.0
    groups: ClassVar[Mapping[str, str]] = {
        "backbone": r"backbone_model\.layers\..*",
        "depth_decoder": r"depth_decoder\.model\.layers\..*",
        "text_projection": r"depth_decoder\.model\.inputs_embeds_projector",
    }

    def __init__(self, folder: Path) -> None:
        """Read config.json.

        Raises:
            ConfigError: it is damaged, or lacks what a model needs.
        """
        super().__init__(folder)
        self._where = str(folder / "config.json")
        self.config = _read_config(folder)
        self.end = int(self.config["codebook_eos_token_id"])
        codes, entries = self.config["codec_config"]["codebook_size"], self.config["vocab_size"]
        self.suppressed = self.suppressed_depth = range(codes, entries)  # no sound
        self.end_codes = [self.end] * (self.config["num_codebooks"] - 1)

    def new_talker(self) -> CsmTalker:
        """See `TalkerKind.new_talker`."""
        model = CsmTalker(self.config, self._where)
        if self.tied():
            model.tie_tables()
        return model

    def tied(self) -> Mapping[str, str]:
        """See `TalkerKind.tied`."""
        return TIED if self.config["tie_codebooks_embeddings"] else {}

    def prompt_rows(self, prompt: SpeechPrompt) -> PromptRows:
        """See `TalkerKind.prompt_rows`."""
        if prompt.instruction:
            raise ValueError(
                f"an instruction ({prompt.instruction:.40}), and this model's prompt has no place for one"
            )
        if prompt.reference_KT is not None:
            raise ValueError(
                "a reference without its words, and this model's prompt shows both: give the text too"
            )
        blocks, targets, end_row = list[SpeechRows](), list[SpeechTargets](), 0
        for turn in prompt.before:
            end_K1 = torch.full((self.config["num_codebooks"], 1), self.end)
            words = self._text_block(turn.speaker, turn.text)
            frames = frame_rows(torch.cat([turn.codes_KT, end_K1], dim=1))
            if prompt.learns_turns and turn.weight:
                first_row = end_row + words.num_rows
                targets.append(SpeechTargets.of(first_row, turn.codes_KT, self.end, self.end_codes))
            blocks += [words, frames]
            end_row += words.num_rows + frames.num_rows
        rows = join_rows([*blocks, self._text_block(prompt.speaker, prompt.text)])
        return PromptRows(rows, turns=tuple(targets))

    def complete(
        self, prompt: SpeechPrompt, vector_C: Tensor | None, mix: PromptMix | None, id: str
    ) -> SpeechPrompt:
        """See `TalkerKind.complete`. A share of the samples learns the earlier turns, too."""
        if mix is None:
            return prompt
        if mix != PromptMix(learned_turns=mix.learned_turns):
            raise ValueError("prompt_mix: this model's prompts have one form; give learned_turns alone")
        return replace(prompt, learns_turns=draw_shares(id)[0] < mix.learned_turns)

    def sampling(self, first: SamplingConfig) -> TalkerSampling:
        """See `TalkerKind.sampling`: the depth decoder's settings are those of generation_config.json."""
        path = self.folder / GENERATION_FILE
        data: Mapping[str, Any] = read_json_file(path, dict) if path.exists() else {}
        if first.temperature == 0 or data.get("depth_decoder_do_sample") is False:
            return TalkerSampling(first, SamplingConfig(temperature=0.0))
        depth = SamplingConfig(
            temperature=float(data.get("depth_decoder_temperature") or first.temperature),
            top_k=int(data.get("depth_decoder_top_k") or 0),
            top_p=float(data.get("depth_decoder_top_p") or 1.0),
        )
        return TalkerSampling(first, depth)

    @property
    def codec_folder(self) -> Path:
        """See `TalkerKind.codec_folder`: the model's own, which bundles its codec."""
        return self.folder

    @property
    def has_codec(self) -> bool:
        """See `TalkerKind.has_codec`."""
        return any(name.startswith("codec_model.") for name in StoredWeights(self.folder).names)

    @cached_property
    def text(self) -> SpeakingText:
        """See `TalkerKind.text`."""
        return SpeakingText.of(read_text_tokenizer(self.folder))

    @cached_property
    def _text_marks(self) -> tuple[str, str]:
        """The marks before and behind a text."""
        data = read_json_file(self.folder / "tokenizer_config.json", dict)
        marks = [data.get(name) for name in ("bos_token", "eos_token")]
        contents = [mark.get("content") if isinstance(mark, dict) else mark for mark in marks]
        if not all(isinstance(content, str) and content for content in contents):
            raise ConfigError(
                "bos_token, eos_token: not given",
                str(self.folder / "tokenizer_config.json"),
                "download the model's tokenizer again",
            )
        return str(contents[0]), str(contents[1])

    def _text_block(self, speaker: str | None, text: str) -> SpeechRows:
        before, behind = self._text_marks
        self.text.ids(text)
        ids: Sequence[int] = self.text.marked_ids(f"{before}[{speaker or ANY_SPEAKER}]{text}{behind}")
        return text_rows(ids, self.config["num_codebooks"])


def _read_config(folder: Path) -> Mapping[str, Any]:
    """config.json with the fields that transformers leaves out because they are as in its class."""
    from transformers import CsmConfig

    data = read_json_file(folder / "config.json", dict)
    try:
        return CsmConfig.from_dict(data).to_dict()
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"no config of CSM: {' '.join(str(error).split()):.200}",
            str(folder / "config.json"),
            "download it again",
        ) from error

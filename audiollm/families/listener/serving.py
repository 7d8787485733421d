"""An audio LLM of transformers as a server such as vLLM sees it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from torch import Tensor

from audiollm.audio import Waveform
from audiollm.errors import BadSample, ConfigError
from audiollm.families.listener.encoding import encode_prompt
from audiollm.families.policy import PromptedAnswers
from audiollm.families.serving import ServedModel, ServedPrompt
from audiollm.files.json_files import read_json_file
from audiollm.models.audio_llms.inputs import (
    InputsError,
    Pictures,
    mono_at,
    placeholder_ids,
    sampling_rate,
    takes_recordings,
    writes_mistral_turns,
)
from audiollm.models.pretrained import StoredWeights
from audiollm.train.loop.whole import unmerged_tensors, whole_tensors

OUR_ENGINE = "leave rollouts out: transformers' generate samples this model"


def check_served_folder(folder: Path) -> None:
    """See `ServedFolder.check_served`."""
    config = read_json_file(folder / "config.json", dict)
    if str(config.get("model_type", "")).endswith("_thinker"):
        raise ConfigError(
            "rollouts: the folder has the thinker of a Qwen-Omni alone, and servers open the whole model",
            str(folder),
            f"begin from the published folder, with its talker; or {OUR_ENGINE}",
        )


class ServedListener:
    """A `ServedModel`.

    Args:
        folder: that the model was loaded from, and that the server opens.
        model: with or without LoRA adapters inside.

    Raises:
        ConfigError: prompts are made by mistral-common, or weights have other names or shapes than in the folder.
    """

    def __init__(self, folder: Path, model: Any, processor: Any, ends: frozenset[int]) -> None:
        if writes_mistral_turns(processor):
            raise ConfigError(
                "rollouts: mistral-common makes the prompts of this model, which servers cannot be given as tokens",
                str(folder),
                OUR_ENGINE,
            )
        self._model, self._processor = model, processor
        self.ends = ends
        self.never_drawn = placeholder_ids(model.config)
        self._tied = frozenset(getattr(model, "all_tied_weights_keys", None) or {})
        self._check_ties(folder)
        self._check_names(folder)

    def prompt(self, prompted: PromptedAnswers) -> ServedPrompt:
        """See `ServedModel.prompt`."""
        parts = [turn_part for _, turn_parts in prompted.prompt for turn_part in turn_parts]
        if any(isinstance(turn_part, Pictures) for turn_part in parts):
            raise BadSample(prompted.place, prompted.id, "servers are given no pictures", "pictures")
        try:
            encoded = encode_prompt(self._processor, prompted)
        except InputsError as error:
            raise BadSample(prompted.place, prompted.id, error.reason, error.kind) from error
        read_ids = encoded.tokens["input_ids"].tolist()
        recordings = [turn_part for turn_part in parts if isinstance(turn_part, Waveform)]
        rate = sampling_rate(self._processor) if takes_recordings(self._processor) else 0
        token_ids = self._with_one_placeholder_each(read_ids)
        if sum(token_id in self.never_drawn for token_id in token_ids) != len(recordings):
            reason = "recordings follow each other without a token between, which servers would read as one"
            raise BadSample(prompted.place, prompted.id, reason, "adjacent recordings")
        sounds = [mono_at(recording, rate)[0].numpy() for recording in recordings]
        return ServedPrompt(prompted.id, prompted.place, token_ids, read_ids, sounds, rate)

    def decode(self, token_ids: Sequence[int]) -> str:
        """See `ServedModel.decode`."""
        return str(self._processor.tokenizer.decode(list(token_ids), skip_special_tokens=True)).strip()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See `ServedModel.tensors`."""
        for name, tensor in whole_tensors(self._model):
            if name not in self._tied:
                yield from self._published(name, tensor).items()

    def _with_one_placeholder_each(self, read_ids: Sequence[int]) -> list[int]:
        """Replace each run of a placeholder by a single one."""
        token_ids: list[int] = []
        for token_id, run in groupby(read_ids):
            token_ids += [token_id] if token_id in self.never_drawn else list(run)
        return token_ids

    def _published(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """A tensor as it is in the files that it was loaded from: its name, and experts one by one."""
        from transformers.core_model_loading import revert_weight_conversion

        published: dict[str, Tensor] = revert_weight_conversion(self._model, {name: tensor})
        return published

    def _check_ties(self, folder: Path) -> None:
        text = self._model.config.get_text_config()
        output, words = self._model.get_output_embeddings(), self._model.get_input_embeddings()
        if (
            getattr(text, "tie_word_embeddings", False)
            and output is not None
            and output.weight is not words.weight
        ):
            raise ConfigError(
                "rollouts: by its text_config, a server ties the table of output words to that of input words, and "
                "transformers has two",
                str(folder / "config.json"),
                f"set tie_word_embeddings: false in text_config; or {OUR_ENGINE}",
            )

    def _check_names(self, folder: Path) -> None:
        stored = StoredWeights(folder)
        names = set(stored.names)
        for name, tensor in unmerged_tensors(self._model).items():
            if name in self._tied:
                module = self._model.get_submodule(name.rpartition(".")[0])
                if hasattr(module, "lora_A"):
                    raise ConfigError(
                        f"rollouts: {name} is tied to another table, and has an adapter of its own",
                        str(folder),
                        "leave it out of lora.target_modules",
                    )
                continue
            for published, cut in self._published(name, tensor.detach().to("meta")).items():
                if published not in names or stored.shape(published) != list(cut.shape):
                    raise ConfigError(
                        f"rollouts: {name} is no tensor of the folder that the server opens, by name and shape "
                        f"({published})",
                        str(folder),
                        OUR_ENGINE,
                    )


_: type[ServedModel] = ServedListener

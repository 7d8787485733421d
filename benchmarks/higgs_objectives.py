"""Training objectives of Higgs Audio V2 over transformers' class, for public_objectives.py.

The public one is the labels that transformers' processor builds (`output_labels=True`) with the loss of its class.

Shapes: B clips, S rows, R rows of audio, T frames of a clip, K codebooks, V entries of a codebook.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import torch
import transformers
from llm_generate import request, transformers_model
from llm_train import padded_inputs
from objective_subjects import BOOKS, CODES, SPREAD, TEXT, Losses
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_utils import PreTrainedModel

from audiollm.data.chat.template import Template
from audiollm.data.packing import pack
from audiollm.data.records.sample import AudioPart, Message
from audiollm.data.text import tokenizer as tokens
from audiollm.families.dual_ffn.losses import TokenLosses
from audiollm.models.decoder import DualFFNConfig
from audiollm.models.dual_ffn import DualFFN

SAMPLES_OF_A_FRAME = 960
CPU = torch.device("cpu")


def subjects(folder: Path) -> list[Callable[[], BuiltLabels]]:
    """The objectives in the order of the table, each over the same random weights."""
    return [partial(BuiltLabels, "transformers' label builder"), partial(OurLabels, "ours")]


class CodesOfClips(transformers.HiggsAudioV2TokenizerModel):
    """The codec under the processor: it gives the codes of clips that are laid out, one after the other."""

    def __init__(self, clips: Sequence[Tensor]) -> None:
        config = transformers.HiggsAudioV2TokenizerConfig(target_bandwidths=[0.1], codebook_size=CODES)
        config.target_bandwidths = [BOOKS * config.frame_rate * config.codebook_nbits / 1000]
        PreTrainedModel.__init__(self, config)  # the codec's own layers would not be used
        self._clips, self.place = (
            list(clips),
            nn.Parameter(torch.zeros(1)),
        )  # the processor asks for its device

    def encode(self, input_values: Tensor, **options: Any) -> SimpleNamespace:
        """Codes `[1, K, T]`."""
        return SimpleNamespace(audio_codes=self._clips.pop(0)[None])


class BuiltLabels:
    """A `Subject`: transformers' class, with the labels of its processor."""

    name = "Higgs Audio V2"

    def __init__(self, objective: str) -> None:
        self.objective = objective
        vocabulary = tokens.train_text_tokenizer([TEXT] * 3, 400)
        self._template = Template(vocabulary, BOOKS, CODES)
        torch.manual_seed(0)
        self._model = DualFFN(
            DualFFNConfig(
                vocabulary.get_vocab_size(), BOOKS, CODES + 2, hidden_size=64, num_layers=2, num_heads=2,
                num_kv_heads=1, head_dim=32, intermediate_size=192,
            )
        )  # fmt: skip
        for parameter in self._model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=SPREAD)
        self._peer = transformers_model(self._model, self._template)
        self._peer.load_state_dict(self._model.state_dict(keep_vars=True), assign=True)
        self._messages = request(TEXT, 1).messages
        self._prompt_S = self._template.prompt(self._messages).text_ids_S

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """See `Subject.parameters`."""
        return list(self._model.parameters())

    def losses(self, clips: Sequence[Tensor]) -> Losses:
        """See `Subject.losses`: the class's own, a sum over codebooks beside that of words."""
        output = self._peer.train()(**self._built_inputs(clips), use_cache=False)
        codes_FK = torch.cat([clip_KT.T for clip_KT in clips])
        logits_FKV = self._frames_of(output.logits, clips[0].shape[1]).flatten(0, 1)
        return Losses(
            output.loss, functional.cross_entropy(logits_FKV.flatten(0, 1), codes_FK.flatten()).detach()
        )

    def frame_logits(self, clip_KT: Tensor, as_generated: bool) -> Tensor:
        """See `Subject.frame_logits`: generation computes the same."""
        inputs = padded_inputs([self._stream(clip_KT)], self._template, CPU)
        labels = ("labels", "audio_labels")
        output = self._peer(
            **{key: value for key, value in inputs.items() if key not in labels}, use_cache=False
        )
        return self._frames_of(output.logits, clip_KT.shape[1])[0]

    def speak(self, limit: int) -> Tensor:
        """See `Subject.speak`."""
        rows_RK = self._peer.eval().generate(
            input_ids=self._prompt_S[None], attention_mask=torch.ones_like(self._prompt_S)[None],
            max_new_tokens=limit + BOOKS, do_sample=False,
        )[0]  # fmt: skip
        ends = (rows_RK[:, 0] == self._template.audio_eos).nonzero()[:, 0].tolist()
        frames = ends[0] - 1 if ends else limit  # the first row is all BOS
        return torch.stack([rows_RK[1 + book : 1 + book + frames, book] for book in range(BOOKS)])

    def _frames_of(self, logits_BSX: Tensor, frames: int) -> Tensor:
        """Logits `[B, T, K, V]` that say each code: of codebook k they stand k rows later."""
        logits_BSKV = logits_BSX.unflatten(2, (BOOKS, -1))
        first = len(self._prompt_S)
        return torch.stack(
            [logits_BSKV[:, first + book : first + book + frames, book] for book in range(BOOKS)], dim=2
        )

    def _stream(self, clip_KT: Tensor) -> Any:
        answer = Message(role="assistant", content=[AudioPart(path="spoken")])
        return self._template.compile([*self._messages, answer], [clip_KT])

    def _built_inputs(self, clips: Sequence[Tensor]) -> dict[str, Tensor]:
        """Inputs and labels as the processor builds them."""
        processor = transformers.HiggsAudioV2Processor(
            transformers.DacFeatureExtractor(sampling_rate=24_000, hop_length=1),
            transformers.PreTrainedTokenizerFast(
                tokenizer_object=self._template.tokenizer,
                bos_token=tokens.BEGIN_OF_TEXT,
                pad_token=tokens.PAD,
            ),
            CodesOfClips(clips),
            audio_delay_token=tokens.AUDIO_IN,
            audio_stream_bos_id=self._template.audio_bos,
            audio_stream_eos_id=self._template.audio_eos,
        )
        prompt = self._template.tokenizer.decode(self._prompt_S.tolist(), skip_special_tokens=False)
        text = f"{prompt}{tokens.AUDIO_OUT}{tokens.AUDIO_EOS}{tokens.END_OF_TURN}"
        sounds = [numpy.zeros(clip_KT.shape[1] * SAMPLES_OF_A_FRAME, numpy.float32) for clip_KT in clips]
        inputs = processor(
            text=[text] * len(clips),
            audio=sounds,
            output_labels=True,
            add_special_tokens=False,
            return_tensors="pt",
        )
        assert torch.equal(inputs["input_ids"][0, : len(self._prompt_S)], self._prompt_S)
        return dict(inputs)


class OurLabels(BuiltLabels):
    """Our own objective, over our own model, which shares its tensors with the class."""

    def losses(self, clips: Sequence[Tensor]) -> Losses:
        """See `Subject.losses`."""
        batch = pack([self._stream(clip_KT) for clip_KT in clips])
        sums = TokenLosses(self._model)(batch)
        audio = sums["audio"] / batch.counts["audio"]
        return Losses(sums["text"] / batch.counts["text"] + audio, audio.detach())

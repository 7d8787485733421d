"""Gates of descriptions: does one fit the sound better than something plainer, by a CLAP or by the model that wrote it.

Shapes: N samples, D dimensions of an embedding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from audiollm.files.json_files import OFFLINE
from audiollm.files.transformers_folders import fit_inputs, open_model, opening

if TYPE_CHECKING:
    from audiollm.audio import Waveform
    from audiollm.families.answering import LikelihoodModel
    from audiollm.models.audio_llms.inputs import Turn
    from pipelines.steps.step import Value

ROUNDING = 1e-4
"""Rounding error in nats per token: for a model that ignores sound, likelihoods differ by less."""
_SHORTEST_WINDOW_S = 0.5
_SILENCE = 1e-4
_BUZZ_HZ, _BUZZ_HARMONICS = 110.0, 36

QuestionAnswers = Sequence[tuple[str, str]]
"""Questions, each with its answer."""


class GateResult(NamedTuple):
    """Result of the gate: two numbers of one kind (larger is better), and the reason of a refusal or nothing."""

    ours: float | None
    reference: float | None
    reason: str | None

    @property
    def accepted(self) -> bool:
        return self.reason is None


class Gate(Protocol):
    """Interface of a gate, which compares a description with a plainer one."""

    def judge(
        self, sound: Waveform, question_answers: QuestionAnswers, text: str, values: Mapping[str, Value]
    ) -> GateResult:
        """
        Args:
            question_answers: each question and its answer.
            text: the answers as one.
            values: what other steps found.
        """


class ClapGate:
    """The cosine of sound and description is at least that of the sound and its labels (AudioSetCaps).

    A sound that is longer than the model takes is heard in windows, the embeddings of which are averaged: nothing is
    drawn at random, as the feature extractor would.

    Raises:
        ConfigError: the folder holds no CLAP, or pickled weights only.
    """

    def __init__(self, folder: Path, max_labels: int) -> None:
        from transformers import ClapModel, ClapProcessor

        from audiollm.devices import default_device

        remedy = "give a folder that transformers' ClapModel reads, with safetensors weights"
        with opening(folder, "CLAP", remedy, "description.clap"):
            self._processor = ClapProcessor.from_pretrained(str(folder), **OFFLINE)
            self._model = open_model(ClapModel, folder, default_device())
        self._max_labels = max_labels

    def judge(
        self, sound: Waveform, question_answers: QuestionAnswers, text: str, values: Mapping[str, Value]
    ) -> GateResult:
        labels = labels_of(values.get("events", {}), self._max_labels)
        if not labels:
            return GateResult(
                None, None, "no labels to compare with: the step events found none, or does not run"
            )
        heard_D = self._sound(sound)
        ours, reference = (
            round(float(heard_D @ self._text(caption)), 4)
            for caption in (text, f"The sound of {', '.join(labels)}.")
        )
        refused = ours < reference
        return GateResult(ours, reference, "the labels fit the sound better" if refused else None)

    def _sound(self, sound: Waveform) -> NDArray[np.float64]:
        extractor = self._processor.feature_extractor
        rate, longest = int(extractor.sampling_rate), int(extractor.nb_max_samples)
        samples_N = sound.mono().resample(rate).samples_CN[0].numpy()
        windows = [samples_N[start : start + longest] for start in range(0, len(samples_N), longest)]
        if len(windows) > 1 and len(windows[-1]) < _SHORTEST_WINDOW_S * rate:
            windows.pop()
        total_D = np.sum(
            [self._embed(extractor(w, sampling_rate=rate, return_tensors="pt")) for w in windows], 0
        )
        return _normalize_embedding(total_D)

    def _text(self, text: str) -> NDArray[np.float64]:
        longest = int(self._model.config.text_config.max_position_embeddings) - 2  # Roberta counts from 2
        tokens = self._processor.tokenizer(text, truncation=True, max_length=longest, return_tensors="pt")
        return self._embed(tokens)

    def _embed(self, inputs: Any) -> NDArray[np.float64]:
        import torch

        kind = "audio" if "input_features" in inputs else "text"
        input_names = ("input_features", "is_longer", "input_ids", "attention_mask")
        model_inputs = fit_inputs(self._model, {name: inputs[name] for name in input_names if name in inputs})
        with torch.inference_mode():
            output = getattr(self._model, f"get_{kind}_features")(**model_inputs)
        embedding_D = output if isinstance(output, torch.Tensor) else output.pooler_output
        return _normalize_embedding(embedding_D[0].double().cpu().numpy())


class SelfGate:
    """The mean log-probability a token of the answers, given this sound, is above its mean over four others: this one
    backwards (the same timbre, no words), noise of its spectrum, a buzz of its level, and silence.

    So a model that writes the same whatever it hears is refused, and one that describes what a recording has in common
    with its reverse or with noise, rain, is not. What is tested is that the words come from the sound. Whether they are
    right only another model can tell: a CLAP.
    """

    def __init__(self, model: LikelihoodModel) -> None:
        self._model = model

    def judge(
        self, sound: Waveform, question_answers: QuestionAnswers, text: str, values: Mapping[str, Value]
    ) -> GateResult:
        mono = sound.mono()
        ours = self.log_probability(mono, question_answers)
        reference = float(
            np.mean(
                [
                    self.log_probability(counterfactual, question_answers)
                    for counterfactual in counterfactual_sounds(mono)
                ]
            )
        )
        refused = not ours > reference + ROUNDING
        reason = "as likely with other sounds" if refused else None
        return GateResult(round(ours, 4), round(reference, 4), reason)

    def log_probability(self, sound: Waveform, question_answers: QuestionAnswers) -> float:
        """The mean over all tokens of the answers, their ends included, in nats."""
        conversations = [([_turn(sound, question)], answer) for question, answer in question_answers]
        total, tokens = self._model.log_probability(conversations)
        return total / tokens


def _turn(sound: Waveform, question: str) -> Turn:
    return "user", [sound, question]


def labels_of(events: Mapping[str, Any], max_labels: int) -> list[str]:
    """The labels of a value of the step `events`, the likeliest first: events above their threshold, else tags."""
    detections = events.get("events") or events.get("tags") or ()
    ordered = sorted(detections, key=lambda detection: (-detection["score"], detection["label"]))
    return list(dict.fromkeys(str(detection["label"]) for detection in ordered))[:max_labels]


def counterfactual_sounds(sound: Waveform) -> list[Waveform]:
    """A mono sound backwards, noise of its spectrum, a buzz of its level, and next to nothing; always the same."""
    import torch

    from audiollm.audio import Waveform

    samples_N = sound.samples_CN[0].double().numpy()
    generator = np.random.default_rng(0)
    spectrum = np.fft.rfft(samples_N)
    phases = np.exp(2j * np.pi * generator.random(len(spectrum)))
    noise_N = np.fft.irfft(np.abs(spectrum) * phases, n=len(samples_N))
    silence_N = _SILENCE * generator.standard_normal(len(samples_N))
    phase_N = 2 * np.pi * _BUZZ_HZ * np.arange(len(samples_N)) / sound.sample_rate
    buzz_N = np.sum([np.cos(number * phase_N) for number in range(1, _BUZZ_HARMONICS + 1)], 0)
    level = np.sqrt(np.mean(samples_N**2) / max(np.mean(buzz_N**2), 1e-12))
    sounds = (samples_N[::-1], noise_N, buzz_N * level, silence_N)
    return [
        Waveform(torch.from_numpy(np.clip(sound_N, -1, 1).astype(np.float32))[None], sound.sample_rate)
        for sound_N in sounds
    ]


def _normalize_embedding(vector_D: NDArray[np.float64]) -> NDArray[np.float64]:
    length = float(np.linalg.norm(vector_D))
    return vector_D / length if length else vector_D

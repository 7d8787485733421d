"""Translations that are not recorded, spoken by a model of ours in the voice of the source's speaker."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from audiollm.audio import AudioError, load, save
from audiollm.data.records.aligned_recording import AlignedRecording, SpokenSpan
from audiollm.errors import BadSample, ConfigError
from audiollm.generation.engine.sampling import SamplingConfig
from audiollm.generation.speaking.speech_generator import SpeechGenerator
from audiollm.generation.speaking.voice import LONGEST_REFERENCE_S, Voice

NOT_SPOKEN = "cannot be spoken"
"""Kind of a recording whose translation could not be spoken."""


@dataclass(frozen=True)
class SpokenTargets:
    """Says the actions of streams; what is there already, from a run that was killed, is not said again."""

    generator: SpeechGenerator
    folder: Path
    seed: int
    sampling: SamplingConfig
    max_duration_s: float | None = None
    """Longest speech of an action; None: three times what its text should take."""

    def of(self, recording: AlignedRecording, path: Path) -> RecordingSpeaker:
        """Return the one that speaks for a recording.

        Args:
            path: the recording.
        """
        return RecordingSpeaker(self, recording, path)


@dataclass(frozen=True)
class RecordingSpeaker:
    """Speaks the translation of one recording, with a voice for each of its speakers (`aligned_records.Speak`)."""

    targets: SpokenTargets
    recording: AlignedRecording
    path: Path
    voices: dict[str | None, Voice] = field(default_factory=dict)

    def __call__(self, text: str, speaker: str | None, number: int) -> SpokenSpan:
        """Say a text, and write it to a file.

        Raises:
            BadSample: the voice cannot be used, the text cannot be said, or the speech did not end.
        """
        targets, recording = self.targets, self.recording
        name = hashlib.sha256(recording.id.encode()).hexdigest()[:16]
        path = targets.folder / f"{name}-{number}.wav"
        try:
            if not path.exists():
                voice = self._voice(speaker)
                speech = targets.generator.speak(
                    text, reference=voice, seed=targets.seed + number, sampling=targets.sampling,
                    max_duration_s=targets.max_duration_s,
                )  # fmt: skip
                if not speech.stopped:
                    raise self._bad(f"the speech of {text!r} did not end within its limit")
                save(path, speech.samples_1N, speech.sample_rate)
            duration_s = load(path).duration_s
        except (ConfigError, AudioError) as error:
            raise self._bad(str(error)) from None
        return SpokenSpan(path=str(path), start_s=0.0, end_s=duration_s)

    def _voice(self, speaker: str | None) -> Voice:
        if speaker not in self.voices:
            start_s, end_s = self._reference(speaker)
            self.voices[speaker] = self.targets.generator.voice(load(self.path, start_s, end_s, mono=True))
        return self.voices[speaker]

    def _reference(self, speaker: str | None) -> tuple[float, float | None]:
        """Return the span of the source that shows a voice: the speaker's longest segment, or the first words."""
        speaker_segments = [
            segment
            for segment in self.recording.segments
            if segment.speaker == speaker and segment.due_s is None
        ]
        if speaker_segments:
            longest = max(speaker_segments, key=lambda segment: segment.end_s - segment.start_s)
            return longest.start_s, min(longest.end_s, longest.start_s + LONGEST_REFERENCE_S)
        if self.recording.words:
            start_s = self.recording.words[0].start_s
            return start_s, start_s + LONGEST_REFERENCE_S
        return 0.0, LONGEST_REFERENCE_S

    def _bad(self, reason: str) -> BadSample:
        return BadSample(self.recording.audio, self.recording.id, reason, NOT_SPOKEN)

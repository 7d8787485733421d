"""Load, save, resample and measure sound: the one waveform type of the whole project.

A waveform is a float32 tensor in [-1, 1] with its sample rate beside it. Whatever goes wrong with a file
surfaces as `AudioError`, which names the file, what is wrong with it and how to mend it; a wrong argument
to a function on tensors is a `ValueError`.

Shapes: C channels, N samples, M samples after resampling.
"""

from __future__ import annotations

import io
import itertools
import math
import numbers
import os
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import soundfile
import soxr
import torch
from torch import Tensor

if TYPE_CHECKING:
    from av.audio.frame import AudioFrame
    from av.audio.stream import AudioStream
    from av.container import InputContainer

HEADERLESS_EXTENSIONS = frozenset({".raw", ".pcm"})
# fmt: off
AUDIO_EXTENSIONS = HEADERLESS_EXTENSIONS | {
    ".wav", ".wave", ".rf64", ".w64", ".flac", ".ogg", ".oga", ".opus", ".mp2", ".mp3", ".m4a", ".m4b",
    ".aac", ".mp4", ".sph", ".aif", ".aiff", ".aifc", ".au", ".snd", ".caf", ".wma", ".webm", ".mka", ".amr",
    ".ac3", ".wv",
}
# fmt: on
_MAGIC_BYTES = tuple(b"fLaC OggS ID3 NIST_1A .snd caff #!AMR wvpk riff\x2e\x91\xcf\x11".split())
_WRITERS = {  # file extension -> libsndfile's format and its default subtype
    ".wav": ("WAV", "PCM_16"),
    ".flac": ("FLAC", "PCM_16"),
    ".ogg": ("OGG", "VORBIS"),
    ".mp3": ("MP3", "MPEG_LAYER_III"),
}
_PCM_BITS = {"PCM_U8": 8, "PCM_S8": 8, "PCM_16": 16, "PCM_24": 24, "PCM_32": 32}
# Headers lie about lengths, and libsndfile's Vorbis encoder overflows its stack on long writes: go by blocks.
_BLOCK_FRAMES = 1 << 16
_UNKNOWN_FRAMES = 1 << 62  # libsndfile's answer for a stream of unknown length is 2**63 - 1
_PREROLL_S = 1.0  # decoded and thrown away after a seek, until a lossy decoder's state has settled
# Seeking into the last page of a Vorbis stream, libsndfile ends up elsewhere (its issue 885). A page holds at
# most 255 packets, 8 s with libvorbis: seek to before it and read on from there.
_VORBIS_PREROLL_S = 20
_MAX_GAP_S = 0.1  # a longer hole between two decoded frames means lost data


class AudioError(Exception):
    """A file (or the bytes of one) that cannot be read or written: `path`, and in `reason` what to do."""

    def __init__(self, path: str | Path, reason: str) -> None:
        super().__init__(path, reason)  # both in args, so that the error survives pickling between processes
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


@dataclass(frozen=True, eq=False)
class Waveform:
    """Sound: float32 `samples_CN` in [-1, 1], shape [channels, samples], and `sample_rate` in Hz."""

    samples_CN: Tensor
    sample_rate: int

    def __post_init__(self) -> None:
        if self.samples_CN.ndim != 2 or self.samples_CN.dtype != torch.float32:
            shape, dtype = tuple(self.samples_CN.shape), self.samples_CN.dtype
            raise ValueError(f"a waveform is float32 [channels, samples], not {dtype} {shape}")
        _check_rate(self.sample_rate)

    @property
    def num_channels(self) -> int:
        return self.samples_CN.shape[0]

    @property
    def num_samples(self) -> int:
        return self.samples_CN.shape[1]

    @property
    def duration_s(self) -> float:
        return self.num_samples / self.sample_rate

    def mono(self) -> Waveform:
        """The mean of the channels, as one channel."""
        return Waveform(to_mono(self.samples_CN), self.sample_rate)

    def resample(self, sample_rate: int) -> Waveform:
        """At another rate (see `resample`); overshoots of the filter are clipped to [-1, 1]."""
        if sample_rate == self.sample_rate:
            return self
        samples_CM = resample(self.samples_CN, self.sample_rate, sample_rate)
        return Waveform(samples_CM.clamp(-1.0, 1.0), sample_rate)


@dataclass(frozen=True)
class AudioInfo:
    """What a file's header says. Lengths are None where it does not say; `duration_s` is an estimate from
    the bit rate in streams without a length (ADTS, MP3 without a Xing header)."""

    sample_rate: int
    num_channels: int
    num_samples: int | None
    duration_s: float | None
    format: str
    codec: str


# Reading


def probe(path: str | Path) -> AudioInfo:
    """Rate, channels, length and codec of a file from its header, without decoding it.

    Raises:
        AudioError: the file cannot be opened, is not audio, or is raw samples without a header.
    """
    path = Path(path)
    _check_readable(path)
    try:
        with _open_soundfile(str(path)) as handle:
            known = handle.frames < _UNKNOWN_FRAMES
            num_samples = handle.frames if known else None
            duration_s = handle.frames / handle.samplerate if known else None
            kind = (handle.format, handle.subtype)
            return AudioInfo(handle.samplerate, handle.channels, num_samples, duration_s, *kind)
    except Exception:  # whatever libsndfile has against the file, FFmpeg decides
        return _probe_with_av(path)


def load(
    path: str | Path,
    start_s: float = 0.0,
    end_s: float | None = None,
    sample_rate: int | None = None,
    mono: bool = False,
) -> Waveform:
    """Read an audio file, or a time span of it, whatever its format and extension.

    libsndfile reads what it reads well (WAV, FLAC, Ogg Vorbis and Opus, SPH, AIFF, CAF, ...), FFmpeg the
    rest (MP3, AAC, M4A, WebM, ...). A span is read by seeking: the rest is not decoded. It equals the same
    slice of the whole file exactly, but for Opus and GSM (the decoder's state: below -40 dB), noise-coded
    bands of AAC, and WebM/Matroska, raw AC-3 and MPEG-TS, which can be out of place by a few milliseconds.
    Values beyond [-1, 1] (float files, overs of a lossy codec) are clipped.

    Args:
        path: the file; its content decides the format, not its extension.
        start_s: where the span starts, in seconds.
        end_s: where it ends; None, or beyond the end: the end of the file.
        sample_rate: resample to this rate in Hz (after the span is cut out); None keeps the file's.
        mono: return the mean of the channels.

    Returns:
        The waveform, [C, N], never empty. A file cut short loads as far as it goes.

    Raises:
        AudioError: not a readable audio file, no samples, NaN or infinite samples, damaged in the middle,
            or a span that is empty or starts beyond the end.
    """
    path = Path(path)
    _check_readable(path)
    return _load(_Request(str(path), path, start_s, end_s, sample_rate, mono))


def load_bytes(
    data: bytes,
    name: str = "<bytes>",
    start_s: float = 0.0,
    end_s: float | None = None,
    sample_rate: int | None = None,
    mono: bool = False,
) -> Waveform:
    """`load` from the content of a file (a member of a shard); `name` stands for the path in errors."""
    return _load(_Request(data, name, start_s, end_s, sample_rate, mono))


def looks_like_audio(path: str | Path) -> bool:
    """Whether a file is audio by its extension or by its first bytes; reads at most 64, never raises.

    `.raw` and `.pcm` count: they hold audio that `load` refuses with a reason.
    """
    path = Path(path)
    try:
        if path.suffix.lower() in AUDIO_EXTENSIONS:
            return not path.is_dir()
        return path.is_file() and _is_audio_header(_read_header(path))
    except (OSError, ValueError):  # unreadable, or a name the system refuses
        return False


def find_audio(folder: str | Path) -> tuple[list[Path], list[Path]]:
    """All files below a folder: (those that look like audio, the others), each sorted by path.

    Hidden files and folders are skipped. Links to folders are not followed; a link that leads out of the
    folder, or nowhere, is listed among the others, so that nothing is dropped unseen.

    Raises:
        AudioError: the folder, or one below it, is missing or cannot be read.
    """
    root = Path(folder)
    resolved_root = root.resolve()
    audio: list[Path] = []
    others: list[Path] = []
    errors: list[OSError] = []
    for parent, folders, files in os.walk(root, onerror=errors.append):
        folders[:] = [name for name in folders if not name.startswith(".")]
        linked_folders = [name for name in folders if Path(parent, name).is_symlink()]
        for path in (Path(parent, name) for name in files + linked_folders if not name.startswith(".")):
            inside = not path.is_symlink() or path.resolve().is_relative_to(resolved_root)
            (audio if inside and path.is_file() and looks_like_audio(path) else others).append(path)
    if errors:
        raise AudioError(errors[0].filename or root, f"cannot be listed ({errors[0].strerror})")
    return sorted(audio), sorted(others)


# Changing


def resample(samples_CN: Tensor, orig_rate: int, new_rate: int) -> Tensor:
    """Change the sample rate: soxr VHQ on the CPU, torchaudio's windowed sinc where soxr cannot go.

    torchaudio serves CUDA tensors and tensors that require a gradient, at the settings it gives as the
    equivalent of resampy's and librosa's `kaiser_best`. Neither clips: the filter may overshoot [-1, 1].

    Args:
        samples_CN: [C, N], floating point.
        orig_rate, new_rate: in Hz.

    Returns:
        [C, M] with M = ceil(N * new_rate / orig_rate), always; the input itself when the rates are equal.

    Raises:
        ValueError: a rate that is not a positive integer.
    """
    _check_rate(orig_rate)
    _check_rate(new_rate)
    num_channels, num_samples = samples_CN.shape
    if orig_rate == new_rate:
        return samples_CN
    num_resampled = -(-num_samples * new_rate // orig_rate)
    if num_samples == 0 or num_channels == 0:
        return samples_CN.new_zeros(num_channels, num_resampled)
    # Both libraries round the length in their own way: give them silence to spare, then cut to the rule.
    spare = 64 * orig_rate // new_rate + 64
    padded_CN = torch.nn.functional.pad(samples_CN, (0, spare))
    if samples_CN.device.type != "cpu" or samples_CN.requires_grad:
        import torchaudio.functional

        resampled_CM: Tensor = torchaudio.functional.resample(
            padded_CN,
            int(orig_rate),
            int(new_rate),
            lowpass_filter_width=64,
            rolloff=0.9475937167399596,
            resampling_method="sinc_interp_kaiser",
            beta=14.769656459379492,
        )
    else:
        resampled = soxr.resample(padded_CN.T.contiguous().numpy(), orig_rate, new_rate, quality="VHQ")
        resampled_CM = torch.from_numpy(resampled).T
    return resampled_CM[:, :num_resampled].contiguous()


def to_mono(samples_CN: Tensor) -> Tensor:
    """The mean of the channels, [1, N]."""
    return samples_CN.mean(dim=0, keepdim=True) if samples_CN.shape[0] != 1 else samples_CN


def set_channels(samples_CN: Tensor, num_channels: int) -> Tensor:
    """[C, N] as [num_channels, N]: any number to mono by the mean, mono to any number by copies.

    Raises:
        ValueError: another change (6 to 2, say), which would need a mixing rule.
    """
    if samples_CN.shape[0] == num_channels:
        return samples_CN
    if num_channels == 1:
        return to_mono(samples_CN)
    if samples_CN.shape[0] == 1 and num_channels > 1:
        return samples_CN.repeat(num_channels, 1)
    raise ValueError(f"no rule to make {num_channels} channels from {samples_CN.shape[0]}: go through mono")


# Loudness


def rms_dbfs(samples_CN: Tensor) -> float:
    """Root mean square over all channels and samples, in dB re full scale 1.0; -inf for silence.

    A full-scale sine is at -3.01 dBFS (some meters, after AES17, call that 0).
    """
    mean_square = float(samples_CN.double().square().mean()) if samples_CN.numel() else 0.0
    return _decibels(math.sqrt(mean_square))


def peak_dbfs(samples_CN: Tensor) -> float:
    """The largest absolute sample, in dB re full scale 1.0; -inf for silence."""
    return _decibels(_peak(samples_CN))


def integrated_loudness_lufs(waveform: Waveform) -> float:
    """Gated loudness of a programme after ITU-R BS.1770-4 (equations 3 to 7), in LUFS; -inf for silence.

    Not torchaudio's `loudness`: that clips the weighted signal (a full-scale 997 Hz sine reads 0.27 dB low)
    and approximates the filters. A clip shorter than one 0.4 s block is measured as one block of its length.

    Raises:
        ValueError: more than 5 channels (left, right, centre, left and right surround).
    """
    import scipy.signal

    if waveform.num_channels > 5:
        raise ValueError(f"loudness is defined for up to 5 channels, not {waveform.num_channels}: mix down")
    if waveform.num_samples == 0:
        return -math.inf
    samples_CN = waveform.samples_CN.detach().cpu().double().numpy()
    weighted_CN = scipy.signal.sosfilt(_k_weighting(waveform.sample_rate), samples_CN, axis=1)
    block = min(round(0.4 * waveform.sample_rate), waveform.num_samples)
    blocks_CBN = np.lib.stride_tricks.sliding_window_view(weighted_CN**2, block, axis=1)
    power_CB = blocks_CBN[:, :: max(1, round(0.1 * waveform.sample_rate))].mean(axis=2)
    power_B = np.array([1.0, 1.0, 1.0, 1.41, 1.41])[: waveform.num_channels] @ power_CB
    power_B = power_B[power_B > 10 ** ((-70.0 + 0.691) / 10)]
    if len(power_B) == 0:
        return -math.inf
    power_B = power_B[power_B > 0.1 * power_B.mean()]
    return -0.691 + 10 * math.log10(power_B.mean())


def normalize_rms(samples_CN: Tensor, target_dbfs: float, peak_limit: float = 0.99) -> Tensor:
    """Scale to an RMS of `target_dbfs`, or as near as the peak allows: no sample exceeds `peak_limit`.

    One gain for all samples, so nothing is clipped. Silence comes back unchanged.

    Returns:
        [C, N] like the input.
    """
    level_dbfs = rms_dbfs(samples_CN)
    if level_dbfs == -math.inf:
        return samples_CN
    gain = min(10 ** ((target_dbfs - level_dbfs) / 20), peak_limit / _peak(samples_CN))
    # float64, where no gain overflows; the clamp takes only the last rounding
    return (samples_CN.double() * gain).to(samples_CN.dtype).clamp(-peak_limit, peak_limit)


# Writing


def save(path: str | Path, samples_CN: Tensor, sample_rate: int, subtype: str | None = None) -> None:
    """Write a .wav, .flac, .ogg or .mp3 file: whole or not at all, with the folders above it.

    Values beyond [-1, 1] are clipped. PCM is rounded without dither so that saving what was loaded from
    PCM of that depth changes no sample.

    Args:
        path: the extension chooses the format.
        samples_CN: [C, N], floating point, on any device.
        sample_rate: in Hz.
        subtype: libsndfile's name of the encoding (PCM_16, PCM_24, FLOAT, ...); None is PCM_16 for .wav and
            .flac, VORBIS for .ogg, MPEG_LAYER_III for .mp3.

    Raises:
        AudioError: samples that are NaN, infinite or none; a format that cannot hold them; a failing disk.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.parent / f".{uuid.uuid4().hex}.tmp"
        try:
            _write(str(temporary), path, samples_CN, sample_rate, path.suffix.lower(), subtype)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        raise AudioError(path, f"cannot be written ({error}): check the folder and the disk") from error


def encode_bytes(samples_CN: Tensor, sample_rate: int, format: str = "wav") -> bytes:
    """The content of a "wav", "flac", "ogg" or "mp3" file, for a shard or a report; see `save`."""
    buffer = io.BytesIO()
    _write(buffer, f"<{format}>", samples_CN, sample_rate, f".{format}", None)
    return buffer.getvalue()


# Private: decoding


@dataclass(frozen=True)
class _Request:
    """What to read: a span of `source` (the path of a file, or its content), called `name` in errors."""

    source: str | bytes
    name: str | Path
    start_s: float
    end_s: float | None
    sample_rate: int | None
    mono: bool

    def check(self) -> None:
        if not 0.0 <= self.start_s < math.inf:
            raise AudioError(self.name, f"start_s must be 0 or more, not {self.start_s}")
        if self.end_s is not None and not self.start_s < self.end_s < math.inf:
            raise AudioError(self.name, f"end_s must be after start_s={self.start_s}, not {self.end_s}")
        if self.sample_rate is not None and not _is_rate(self.sample_rate):
            raise AudioError(self.name, f"sample_rate must be a positive integer, not {self.sample_rate!r}")

    def in_samples(self, sample_rate: int) -> tuple[int, int]:
        start = round(self.start_s * sample_rate)
        stop = sys.maxsize if self.end_s is None else round(self.end_s * sample_rate)
        if stop <= start:
            raise AudioError(self.name, f"{self.start_s} to {self.end_s} s: no sample at {sample_rate} Hz")
        return start, stop

    def starts_beyond(self, duration_s: float) -> AudioError:
        return AudioError(self.name, f"start_s={self.start_s} is beyond the end at {duration_s:.3f} s")


def _load(request: _Request) -> Waveform:
    request.check()
    try:
        samples_CN, file_rate = _decode_with_soundfile(request)
    except AudioError:
        raise
    except Exception:  # whatever libsndfile has against the file, FFmpeg decides
        samples_CN, file_rate = _decode_with_av(request)
    low, high = (float(value) for value in torch.aminmax(samples_CN))
    if not (math.isfinite(low) and math.isfinite(high)):
        raise AudioError(request.name, "holds NaN or infinite samples: write the file anew from its origin")
    if low < -1.0 or high > 1.0:
        samples_CN.clamp_(-1.0, 1.0)
    waveform = Waveform(samples_CN, file_rate)
    waveform = waveform.mono() if request.mono else waveform
    return waveform if request.sample_rate is None else waveform.resample(request.sample_rate)


def _open_soundfile(source: str | bytes) -> soundfile.SoundFile:
    """Open what libsndfile reads well; anything else raises, and is left to FFmpeg.

    Not MP3: libsndfile estimates the length and cuts files of variable bit rate off there.
    Not RAW: it takes any bytes with the extension .au, .gsm or .vox for samples.
    """
    handle = soundfile.SoundFile(source if isinstance(source, str) else io.BytesIO(source))
    if handle.format in ("MP3", "RAW") or handle.frames == 0:
        handle.close()
        raise ValueError(f"left to FFmpeg: {handle.format}, {handle.frames} frames")
    return handle


def _decode_with_soundfile(request: _Request) -> tuple[Tensor, int]:
    with _open_soundfile(request.source) as handle:
        rate, num_frames = handle.samplerate, handle.frames
        start, stop = request.in_samples(rate)
        stop = min(stop, num_frames)
        if start >= num_frames:
            raise request.starts_beyond(num_frames / rate)
        if start > 0:
            preroll = min(start, _VORBIS_PREROLL_S * rate) if handle.subtype == "VORBIS" else 0
            handle.seek(start - preroll)
            handle.read(preroll)
        block, blocks_CN = max(1, _BLOCK_FRAMES // handle.channels), []
        while start < stop:
            block_NC = handle.read(min(block, stop - start), dtype="float32", always_2d=True)
            if len(block_NC) == 0:
                raise ValueError(f"left to FFmpeg: {stop - start} frames fewer than promised")
            blocks_CN.append(torch.from_numpy(block_NC).T)
            start += len(block_NC)
        return torch.cat(blocks_CN, dim=1).contiguous(), rate


def _decode_with_av(request: _Request, may_seek: bool = True) -> tuple[Tensor, int]:
    """Decode with FFmpeg: seek to a little before the span, throw that away, stop behind it."""
    name, start_s = request.name, request.start_s
    with _open_av(request.source, name) as (container, stream):
        frames = _av_frames(container, stream, name)
        first = next(frames, None)
        if first is None:
            raise AudioError(name, "holds no samples that can be decoded: empty or cut off, get it anew")
        rate, origin_s, position = first.sample_rate, first.time or 0.0, 0
        start, stop = request.in_samples(rate)
        if may_seek and start_s > _PREROLL_S:
            frames = _av_frames(container, stream, name, seek_s=origin_s + start_s - _PREROLL_S)
            first = next(frames, None)
            if first is None or first.time is None or first.time - origin_s > start_s:
                return _decode_with_av(request, may_seek=False)
            position = round((first.time - origin_s) * rate)
        blocks_CN = []
        for frame in itertools.chain([first], frames):
            if (frame.sample_rate, frame.layout) != (rate, first.layout):
                raise AudioError(name, "changes its sample rate or channels midway: re-encode it with ffmpeg")
            if position + frame.samples > start:
                blocks_CN.append(_frame_samples(frame)[:, max(0, start - position) : stop - position])
            position += frame.samples
            if position >= stop:
                break
    if not blocks_CN:
        raise request.starts_beyond(position / rate)
    return torch.cat(blocks_CN, dim=1), rate


def _probe_with_av(path: Path) -> AudioInfo:
    with _open_av(str(path), path) as (container, stream):
        context = stream.codec_context
        if not context.sample_rate:
            raise AudioError(path, "has no readable audio header: it is damaged or not audio, get it anew")
        duration_s = container.duration / 1e6 if container.duration is not None else None
        if stream.duration is not None and stream.time_base is not None:
            duration_s = float(stream.duration * stream.time_base)
        kind = (container.format.name, context.name)
        return AudioInfo(context.sample_rate, context.channels, None, duration_s, *kind)


@contextmanager
def _open_av(source: str | bytes, name: str | Path) -> Iterator[tuple[InputContainer, AudioStream]]:
    import av

    # No protocol is allowed: a playlist dressed up as audio must not reach other files or the network.
    options = {"protocol_whitelist": "none"}
    try:
        with (
            open(source, "rb") if isinstance(source, str) else io.BytesIO(source) as binary,
            av.open(binary, "r", options=options) as container,
        ):
            if not container.streams.audio:
                raise AudioError(name, "has no audio stream")
            stream = container.streams.audio[0]
            if stream.codec_context.name == "flac":  # otherwise FFmpeg plays damaged frames as noise
                stream.codec_context.options = {"err_detect": "crccheck+explode"}
            yield container, stream
    except (AudioError, MemoryError):
        raise
    except Exception as error:
        reason = f"cannot be read as audio ({getattr(error, 'strerror', None) or error})"
        raise AudioError(name, f"{reason}: get it anew, or convert it to WAV or FLAC") from error


def _av_frames(
    container: InputContainer, stream: AudioStream, name: str | Path, seek_s: float | None = None
) -> Iterator[AudioFrame]:
    """Decoded frames in order, from the one before `seek_s` if given; none where the container cannot seek.

    Packets that fail before the first frame or after the last are junk around the recording; between
    frames they are, like a jump of the clock, a hole in it.
    """
    import av

    if seek_s is not None:
        try:
            container.seek(int(seek_s / (stream.time_base or 1)), stream=stream)
        except av.FFmpegError:
            return
    end_s: float | None = None
    is_broken = False
    for packet in container.demux(stream):
        try:
            frames = packet.decode()
        except av.FFmpegError:
            is_broken = end_s is not None
            continue
        for frame in frames:
            time_s = (end_s or 0.0) if frame.time is None else frame.time
            if end_s is not None and (is_broken or time_s - end_s > _MAX_GAP_S):
                repair = "ffmpeg -i IN -af aresample=async=1 OUT.wav fills the hole with silence"
                raise AudioError(name, f"is damaged at about {end_s:.1f} s: get it anew, or {repair}")
            end_s = time_s + frame.samples / frame.sample_rate
            yield frame


def _frame_samples(frame: AudioFrame) -> Tensor:
    """A decoded frame of any sample format as float32 [C, N]."""
    samples = frame.to_ndarray()
    if not frame.format.is_planar:
        samples = samples.reshape(-1, frame.layout.nb_channels).T
    if samples.dtype.kind in "iu":
        full_scale = 2.0 ** (8 * samples.dtype.itemsize - 1)
        samples = (samples - (full_scale if samples.dtype.kind == "u" else 0.0)) / full_scale
    return torch.from_numpy(np.ascontiguousarray(samples, dtype=np.float32))


# Private: encoding, checks, measures


def _write(
    target: str | io.BytesIO,
    name: str | Path,
    samples_CN: Tensor,
    sample_rate: int,
    extension: str,
    subtype: str | None,
) -> None:
    if extension not in _WRITERS:
        raise AudioError(name, f"cannot write format {extension!r}: use one of {', '.join(_WRITERS)}")
    if samples_CN.ndim != 2 or samples_CN.numel() == 0:
        raise AudioError(name, f"not written: [channels, samples] expected, got {tuple(samples_CN.shape)}")
    if not bool(torch.isfinite(samples_CN).all()):
        raise AudioError(name, "not written: the samples hold NaN or infinity")
    file_format, default_subtype = _WRITERS[extension]
    subtype = subtype or default_subtype
    samples_NC = samples_CN.detach().cpu().float().clamp(-1.0, 1.0).T.numpy()
    try:
        with soundfile.SoundFile(
            target, "w", int(sample_rate), samples_NC.shape[1], subtype, format=file_format
        ) as handle:
            for start in range(0, len(samples_NC), _BLOCK_FRAMES):
                block_NC = np.ascontiguousarray(samples_NC[start : start + _BLOCK_FRAMES])
                bits = _PCM_BITS.get(subtype)
                handle.write(_quantize(block_NC, bits) if bits else block_NC)
    except (soundfile.SoundFileError, ValueError, TypeError) as error:
        detail = f"{samples_NC.shape[1]} channels, {sample_rate} Hz, {subtype}"
        raise AudioError(name, f"cannot be written as {file_format} with {detail}: {error}") from error


def _quantize(block_NC: np.ndarray, bits: int) -> np.ndarray:
    """Round to the grid of `bits` in the top bits of an int32, where libsndfile looks for them.

    libsndfile's own conversion scales by 2**15 - 1 and reads back by 2**15, so that saving a loaded file
    would change it.
    """
    scale = 2.0 ** (bits - 1)
    levels = np.clip(np.round(block_NC.astype(np.float64) * scale), -scale, scale - 1)
    return levels.astype(np.int32) << (32 - bits)


def _is_rate(sample_rate: object) -> bool:
    return isinstance(sample_rate, numbers.Integral) and int(sample_rate) > 0


def _check_rate(sample_rate: int) -> None:
    if not _is_rate(sample_rate):
        raise ValueError(f"a sample rate is a positive integer in Hz, not {sample_rate!r}")


def _check_readable(path: Path) -> None:
    try:
        if not path.is_file():
            raise AudioError(path, "is not a file: check the path" if path.exists() else "does not exist")
        header = _read_header(path)
    except OSError as error:
        raise AudioError(path, f"cannot be opened ({error.strerror}): check its permissions") from error
    if not header:
        raise AudioError(path, "is empty (0 bytes): get it anew")
    if path.suffix.lower() in HEADERLESS_EXTENSIONS and not _is_audio_header(header):
        convert = "convert it first, like: ffmpeg -f s16le -ar RATE -ac CHANNELS -i IN.raw OUT.wav"
        raise AudioError(
            path, f"is raw samples without a header, so rate and encoding are unknown: {convert}"
        )


def _read_header(path: Path) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read(64)


def _is_audio_header(header: bytes) -> bool:
    if header.startswith(_MAGIC_BYTES):
        return True
    if header[:4] in (b"RIFF", b"RIFX", b"RF64", b"BW64"):
        return header[8:12] == b"WAVE"
    if header[:4] == b"FORM":
        return header[8:12] in (b"AIFF", b"AIFC")
    if header[4:8] == b"ftyp":
        return header[8:12] in (b"M4A ", b"M4B ")
    return _is_mpeg_frame(header)


def _is_mpeg_frame(header: bytes) -> bool:
    """A frame header of MPEG audio layer II or III (ISO/IEC 11172-3) or of ADTS AAC (ISO/IEC 13818-7)."""
    if len(header) < 4 or header[0] != 0xFF or header[1] & 0xE0 != 0xE0:
        return False
    version, layer = header[1] >> 3 & 3, header[1] >> 1 & 3
    if layer == 0:
        return version >= 2 and header[1] & 0xF0 == 0xF0 and header[2] >> 2 & 15 < 13
    return layer in (1, 2) and version != 1 and header[2] >> 4 not in (0, 15) and header[2] >> 2 & 3 != 3


def _k_weighting(sample_rate: int) -> list[list[float]]:
    """The two filters of BS.1770-4, Annex 1, as second-order sections for any rate.

    From their analog parameters, as in libebur128; at 48 kHz these are the coefficients of the standard.
    """
    shelf_hz, shelf_db, shelf_q = 1681.974450955533, 3.999843853973347, 0.7071752369554196
    k, high = math.tan(math.pi * shelf_hz / sample_rate), 10 ** (shelf_db / 20)
    band, a0 = high**0.4996667741545416, 1 + k / shelf_q + k * k
    shelf = [high + band * k / shelf_q + k * k, 2 * (k * k - high), high - band * k / shelf_q + k * k]
    shelf += [a0, 2 * (k * k - 1), 1 - k / shelf_q + k * k]
    low_cut_hz, low_cut_q = 38.13547087602444, 0.5003270373238773
    k = math.tan(math.pi * low_cut_hz / sample_rate)
    a0 = 1 + k / low_cut_q + k * k
    low_cut = [a0, -2 * a0, a0, a0, 2 * (k * k - 1), 1 - k / low_cut_q + k * k]
    return [[value / section[3] for value in section] for section in (shelf, low_cut)]


def _peak(samples_CN: Tensor) -> float:
    return float(samples_CN.abs().max()) if samples_CN.numel() else 0.0


def _decibels(amplitude: float) -> float:
    return -math.inf if amplitude == 0 else 20 * math.log10(amplitude)

"""Sound while codes are made: all of it, in order, and as early as the codec allows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from audiollm.codec import StreamedCodec
from audiollm.generation.engine.request import Answer, Event, Finished, Frames, TextPiece
from audiollm.generation.engine.streaming import OverlappingWindows, StreamPiece, code_stream, stream_audio
from tokenizer.native.model import AudioTokenizer, TokenizerConfig

TINY = TokenizerConfig(
    num_codebooks=2, codebook_size=16, latent_dim=8, mel_hidden_size=16, hidden_size=24,
    encoder_layers=(1, 1), decoder_layers=(1, 1),
)  # fmt: skip


class Smoothing:
    """A codec that cannot decode in pieces: a frame's sound depends on 3 frames before it and 2 behind."""

    frame_rate, num_codebooks, codebook_size, sample_rate = 25.0, 2, 16, 1000
    codebook_vectors_KVD = torch.zeros(2, 16, 1)

    def encode(self, samples_CN: Tensor) -> Tensor:
        raise NotImplementedError("this codec is for decoding")

    def decode(self, codes_KT: Tensor) -> Tensor:
        level_1T = functional.pad(codes_KT.sum(dim=0, keepdim=True).float(), (3, 2))
        smooth_1T = functional.conv1d(level_1T[None], torch.arange(1.0, 7.0)[None, None])[0]
        return smooth_1T.repeat_interleave(40, dim=1)


@pytest.fixture(scope="module")
def codec() -> AudioTokenizer:
    torch.manual_seed(0)
    return AudioTokenizer(TINY).eval()


def codes(frames: int, seed: int = 0) -> Tensor:
    return torch.randint(16, (2, frames), generator=torch.Generator().manual_seed(seed))


def events_of(*parts: str | Tensor) -> Iterator[Event]:
    """Events as the engine emits them: text in pieces, frames one by one."""
    stretch = -1
    for part in parts:
        if isinstance(part, str):
            yield TextPiece(7, part)
            continue
        stretch += 1
        for frame in range(part.shape[1]):
            yield Frames(7, part[:, frame : frame + 1], stretch)
    speech = [part for part in parts if isinstance(part, Tensor)]
    yield Finished(7, Answer(parts, torch.cat([codes(0), *speech], dim=1), "end", None, 0.0))


def sound(pieces: list[StreamPiece]) -> Tensor:
    return torch.cat([piece.samples_1N for piece in pieces], dim=1)


@pytest.mark.parametrize("chunk_frames", [1, 4, 100])
@pytest.mark.parametrize("frames", [1, 2, 30])
def test_streamed_sound_is_that_of_decode(codec: AudioTokenizer, frames: int, chunk_frames: int) -> None:
    spoken_KT = codes(frames)
    pieces = list(stream_audio(events_of(spoken_KT), codec, chunk_frames))
    torch.testing.assert_close(sound(pieces), codec.decode(spoken_KT), atol=1e-5, rtol=1e-4)
    assert pieces[-1].answer is not None and (pieces[-1].first_audio_s or 0) > 0
    assert all(piece.answer is None for piece in pieces[:-1])


def test_sound_comes_before_the_end_of_the_speech(codec: AudioTokenizer) -> None:
    """The first samples with the third frame, two being the decoder's latency; then in chunks."""
    told, heard_after = 0, []

    def counted() -> Iterator[Event]:
        nonlocal told
        for event in events_of(codes(30)):
            told += 1
            yield event

    for piece in stream_audio(counted(), codec, 4):
        if piece.samples_1N.shape[1]:
            heard_after.append(told)
    assert heard_after == [3, 7, 11, 15, 19, 23, 27, 31]


def test_text_and_stretches_of_speech_come_in_their_order(codec: AudioTokenizer) -> None:
    """Each stretch is decoded by itself, also where one follows the other at once."""
    first, second, third = (codes(frames, frames) for frames in (3, 9, 5))
    pieces = list(stream_audio(events_of("one ", first, "two", second, third), codec))
    kinds = "".join("t" if piece.text else "s" for piece in pieces[:-1])
    assert kinds.startswith("ts") and kinds.count("t") == 2 and kinds.endswith("s")
    wanted = torch.cat([codec.decode(each) for each in (first, second, third)], dim=1)
    torch.testing.assert_close(sound(pieces), wanted, atol=1e-5, rtol=1e-4)
    before_two = torch.cat([p.samples_1N for p in pieces[: kinds.rindex("t")]], dim=1)
    assert before_two.shape[1] == codec.decode(first).shape[1]
    silent = list(stream_audio(events_of("only words"), codec))
    assert [piece.text for piece in silent] == ["only words", ""] and silent[-1].first_audio_s is None


@pytest.mark.parametrize("frames", [1, 2, 7, 8, 9, 50])
@pytest.mark.parametrize("piece", [1, 5])
def test_overlapping_windows_decode_as_the_whole_where_the_codec_looks_no_further(
    frames: int, piece: int
) -> None:
    codec, whole_KT = Smoothing(), codes(frames)
    assert not isinstance(codec, StreamedCodec)
    decoder = OverlappingWindows(codec, past=3, future=2, window=4)
    for _ in range(2):  # a flush begins anew
        parts = [decoder.push(each) for each in whole_KT.split(piece, dim=1)]
        assert sum(part.shape[1] for part in parts) >= 40 * (frames - 5)
        assert torch.equal(torch.cat([*parts, decoder.flush()], dim=1), codec.decode(whole_KT))
    assert decoder.latency_s == 6 / 25
    assert decoder.flush().shape == (1, 0)
    short = OverlappingWindows(codec, past=1, future=2, window=4)
    shorter = torch.cat([*(short.push(each) for each in whole_KT.split(1, dim=1)), short.flush()], dim=1)
    assert torch.equal(shorter, codec.decode(whole_KT)) is (frames < 7)  # the context does count


def test_windows_grow_and_decode_as_the_whole() -> None:
    """Sound as soon as without growth, in fewer and longer pieces; the last ones as long as they may be."""
    codec, whole_KT = Smoothing(), codes(60)
    lengths, growing = {}, OverlappingWindows(codec, past=3, future=2, window=4, max_window=10)
    for name, decoder in (
        ("even", OverlappingWindows(codec, past=3, future=2, window=4)),
        ("growing", growing),
    ):
        parts = [decoder.push(frame_K1) for frame_K1 in whole_KT.split(1, dim=1)]
        lengths[name] = [part.shape[1] // 40 for part in parts if part.shape[1]]
        assert torch.equal(torch.cat([*parts, decoder.flush()], dim=1), codec.decode(whole_KT))
    assert lengths == {"even": [1] + [4] * 14, "growing": [1, 5, 9, 10, 10, 10, 10]}
    assert growing.latency_s == 12 / 25


def test_a_codec_that_can_decode_in_pieces_does(codec: AudioTokenizer) -> None:
    assert isinstance(codec, StreamedCodec) and code_stream(codec).latency_s == pytest.approx(0.095)
    assert isinstance(code_stream(Smoothing()), OverlappingWindows)

"""Places of text in sampled tokens: exact for tokens of several characters, and for parts of one."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from audiollm.data.text.tokenizer import AUDIO_OUT_BOS
from audiollm.families.listener.policy import ListenerPolicy
from audiollm.families.logprobs.text_places import actions_at, pieces_of
from audiollm.generation.engine.request import SampledTokens
from tests.audiollm.families.dual_ffn.packed_samples import load, save_model
from tests.audiollm.models.tiny_audio_llms import save_tiny


def sampled(ids: list[int], **changes: object) -> SampledTokens:
    fields = {"codes": (), "ended": (), **changes}
    is_action_N = fields.pop("is_action_N", torch.ones(len(ids), dtype=torch.bool))
    return SampledTokens("text", torch.tensor(ids), is_action_N, logprob_A=None, **fields)  # type: ignore[arg-type]


def merged() -> Tokenizer:
    """Byte-level BPE with tokens that span words and sentences."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: n for n, letter in enumerate(letters)}
    merges = [("a", "."), ("a.", "Ġ"), ("b", "."), ("a.Ġ", "b.")]
    for pair in merges:
        vocabulary["".join(pair)] = len(vocabulary)
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made


def test_tokens_of_several_characters_and_parts_of_one() -> None:
    tokenizer = merged()
    encode = tokenizer.get_vocab().__getitem__
    ids = [encode("a.Ġ"), encode("c"), encode("a.Ġb."), *map(encode, "Ã©"), encode("!")]  # "a. ca. b.é!"
    assert tokenizer.decode(ids) == "a. ca. b.é!"
    places = actions_at(sampled(ids), "a. ca. b.é!", [1, 2, 3, 4, 6, 9, 10, 11, 99], tokenizer.decode)
    assert places == [
        0,
        0,
        0,
        1,
        2,
        2,
        4,
        5,
        5,
    ]  # é is whole with its second byte; "a." and " b." end in one token
    assert actions_at(sampled(ids), "c", [1], tokenizer.decode) == [1]  # white space around it was stripped
    assert actions_at(sampled([]), "", [0], tokenizer.decode) == [0]


def test_bytes_that_are_no_text_count_when_they_are_given_up() -> None:
    tokenizer = merged()
    encode = tokenizer.get_vocab().__getitem__
    ids = [encode("c"), encode("Ã"), encode("c")]
    assert actions_at(sampled(ids), "c�c", [1, 2, 3], tokenizer.decode) == [0, 2, 2]


def test_policies_find_ends_of_sentences(tmp_path: Path) -> None:
    save_tiny("qwen2_audio", tmp_path / "llm")
    policy = ListenerPolicy.load(tmp_path / "llm")
    text = "é. 猫が鳴く。 It ends."
    ids = policy.processor.tokenizer(text, add_special_tokens=False)["input_ids"] + [min(policy.ends)]
    ends = [2, 8, len(text)]
    expected = [len(text[:end].encode()) - 1 for end in ends]  # a token per byte
    assert policy.actions_at(sampled(ids), text, ends) == expected


def test_speech_between_texts_counts(tmp_path: Path) -> None:
    policy = load(save_model(tmp_path / "dual", "features"))
    tokenizer = policy.template.tokenizer
    opens = tokenizer.token_to_id(AUDIO_OUT_BOS)
    first, last = (tokenizer.encode(text, add_special_tokens=False).ids for text in ("one", "two"))
    ids = [*first, opens, *last]
    is_action_N = torch.ones(len(ids), dtype=torch.bool)
    is_action_N[len(first)] = False  # forced
    tokens = sampled(ids, is_action_N=is_action_N, codes=(torch.zeros(2, 5).long(),), ended=(True,))
    found = policy.actions_at(tokens, tokenizer.decode(ids), [3, 6])
    assert found == [len(first) - 1, len(first) + 11 + len(last) - 1]
    assert found[1] == tokens.num_actions - 1


def test_pieces_are_the_text_of_each_token() -> None:
    tokenizer = merged()
    encode = tokenizer.get_vocab().__getitem__
    ids = [
        encode("a.Ġ"),
        encode("c"),
        encode("a.Ġb."),
        *map(encode, "Ã©"),
        encode("!"),
        encode("Ã"),
        encode("c"),
    ]
    tokens = sampled(ids)
    pieces = pieces_of(tokens, tokenizer.decode, tokenizer.id_to_token)
    assert pieces == ["a. ", "c", "a. b.", "", "é", "!", "", "�c"]
    assert "".join(map(str, pieces)) == tokenizer.decode(ids) and len(pieces) == tokens.num_actions


def test_pieces_of_policies_count_every_action(tmp_path: Path) -> None:
    save_tiny("qwen2_audio", tmp_path / "llm")
    policy = ListenerPolicy.load(tmp_path / "llm")
    ids = policy.processor.tokenizer("é is one", add_special_tokens=False)["input_ids"] + [min(policy.ends)]
    pieces = policy.pieces(sampled(ids))
    assert "".join(map(str, pieces[:-1])) == "é is one" and len(pieces) == len(ids)
    assert pieces[-1] == policy.processor.tokenizer.convert_ids_to_tokens(min(policy.ends))
    own = load(save_model(tmp_path / "dual", "features"))
    opens = own.template.tokenizer.token_to_id(AUDIO_OUT_BOS)
    first, last = (
        own.template.tokenizer.encode(text, add_special_tokens=False).ids for text in ("one", "two")
    )
    is_action_N = torch.ones(len(first) + 1 + len(last), dtype=torch.bool)
    is_action_N[len(first)] = False  # the mark was forced
    codes_KT = torch.zeros(4, 3, dtype=torch.long)
    spoken = sampled([*first, opens, *last], is_action_N=is_action_N, codes=(codes_KT,), ended=(True,))
    told = own.pieces(spoken)
    assert [piece for piece in told if isinstance(piece, int)] == [13] and told.index(13) == len(first)
    assert sum(piece if isinstance(piece, int) else 1 for piece in told) == spoken.num_actions

"""Rewards of streams: reference vectors, ranks, and the order in which behaviours are ranked."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from audiollm.evaluate.judges.text_scorers import choose_text_scorer
from audiollm.interpret.rewards.action_rewards import (
    detection,
    duration_ratio,
    format_match,
    initiative,
    quality,
    similarity_by,
    timing,
)
from audiollm.interpret.rewards.combining import (
    GateChoice,
    gated,
    gated_latency,
    grouped,
    seqpo,
    standardized,
    standardized_in_groups,
    sum_z,
    table_moments,
)
from audiollm.interpret.rewards.sentence_scores import lagging_latency, sentence_scores
from audiollm.interpret.rewards.sequence_rewards import (
    lagging,
    process_quality,
    sequence_quality,
    stream_lagging,
    waits_of,
)
from audiollm.interpret.rewards.stream_actions import ChunkAction, InterpretedStream, RewardTable, StreamBatch
from audiollm.rl.policy_gradient.advantages import action_credit, actions_of_tokens
from audiollm.rl.policy_gradient.kl import kl_controller

SILENCE = ChunkAction()
CHRF = similarity_by(choose_text_scorer("chrf", "de"))
ROOT2 = 2**0.5


def says(text: str, duration_s: float | None = None) -> ChunkAction:
    return ChunkAction(text, 0.1 * len(text) if duration_s is None else duration_s)


def stream(*texts: str, reference: Sequence[str] | None = None) -> InterpretedStream:
    actions, wanted = (
        [says(text) if text else SILENCE for text in each] for each in (texts, reference or texts)
    )
    return InterpretedStream(actions, wanted)


def table(*values: float | None) -> RewardTable:
    return RewardTable(
        torch.tensor([0.0 if value is None else value for value in values], dtype=torch.float64),
        torch.tensor([value is not None for value in values]),
    )


def test_detection_and_initiative_of_the_reference_vector() -> None:
    batch = StreamBatch([stream("", "a", "b", "", reference=["", "a", "", "b"])])
    assert detection(batch).values.tolist() == [[1, 0, 0, 0]]
    assert initiative(batch).values.tolist() == [[0, 1, 0, 0]]
    assert detection(batch).defined.all()


def test_quality_is_defined_where_both_speak_and_padding_is_not() -> None:
    short = stream("aus", reference=["Haus"])
    batch = StreamBatch([stream("", "ein Haus", "x", reference=["", "ein Haus", ""]), short])
    found = quality(batch, CHRF)
    assert found.defined.tolist() == [[False, True, False], [True, False, False]]
    assert found.values[0, 1] == 1
    assert 0.2 < float(found.values[1, 0]) < 0.9
    assert detection(batch).defined.tolist() == [[True] * 3, [True, False, False]]
    assert batch.last_BT().tolist() == [[False, False, True], [True, False, False]]


def test_timing_and_format() -> None:
    expected = {(2, 2): 1, (3, 2): 2 / 3, (1, 2): 0.5, (0, 2): 0, (0, 0): 1, (2, 0): 0}
    assert {pair: duration_ratio(*pair) for pair in expected} == pytest.approx(expected)
    sampled = InterpretedStream(
        [says("a", 3.0), SILENCE], [says("b", 2.0), SILENCE], source_durations_s=[6.0, 0.0]
    )
    batch = StreamBatch([sampled])
    assert timing(batch).values[0].tolist() == pytest.approx([2 / 3, 1])
    assert timing(batch, "source").values.tolist() == [[0.5, 1]]
    with pytest.raises(ValueError, match="needs the durations"):
        timing(StreamBatch([stream("a")]), "source")
    written = StreamBatch(
        [InterpretedStream([ChunkAction("[S1] a"), ChunkAction("b"), SILENCE], [SILENCE] * 3)]
    )
    assert format_match(written, r"|\[S\d\] .+").values.tolist() == [[1, 0, 1]]


def test_waits_and_lagging_of_the_reference_vectors() -> None:
    said_at = stream("", "a", "b", "", "", "", "c", "")
    assert waits_of(said_at, "run") == [1, 0, 3]
    assert stream_lagging(stream(*[""] * 8), 2, "run") == -6
    runs = stream("", "a", "", "", "", "b", *[""] * 5, "c", "", "", "d")
    assert waits_of(runs, "run") == [1, 3, 5, 2]
    assert lagging(StreamBatch([runs]), 2).values.tolist() == [-1]
    assert stream_lagging(stream("", "a", "", "b"), 2, "run") == 0
    assert stream_lagging(stream(*[*[""] * 4, "a"] * 3), 1, "run") == -3


def test_a_constant_lag_is_seen_by_lag_alone() -> None:
    """Speaking at every second chunk, three chunks late: `run` sees it once, at the first segment."""
    texts = ["", "a", "", "b", "", "c"]
    ends, nothing = [1, 3, 5], [SILENCE] * 9
    late = InterpretedStream([SILENCE] * 3 + [says(t) if t else SILENCE for t in texts], nothing, ends)
    punctual = InterpretedStream([says(t) if t else SILENCE for t in [*texts, "", "", ""]], nothing, ends)
    assert waits_of(punctual, "lag") == [0, 0, 0]
    assert waits_of(late, "lag") == [3, 3, 3]
    assert waits_of(late, "run")[1:] == waits_of(punctual, "run")[1:]
    more = InterpretedStream([says("a"), says("b")], [SILENCE] * 2, source_ends=[0])
    assert waits_of(more, "lag") == [0, 1]
    with pytest.raises(ValueError, match="source_ends"):
        waits_of(stream("a"), "lag")


def test_a_wait_for_the_source_of_nothing_is_not_defined() -> None:
    """Whatever the model does: the reference of the first stream is silent throughout."""
    silent = InterpretedStream([says("a"), SILENCE], [SILENCE] * 2)
    found = lagging(StreamBatch([silent, InterpretedStream([says("b")], [says("b")], [0])]), 0, "lag")
    assert found.defined.tolist() == [False, True] and not found.problems


def test_a_score_that_is_missing_is_told_with_its_reason() -> None:
    """The scorer has none for outputs that say b: the value is not defined, and all that need it tell why."""

    def similarity(pairs: Sequence[tuple[str, str]]) -> list[float | str]:
        return ["the scorer hangs" if "b" in output else 0.5 for output, _ in pairs]

    batch = StreamBatch([stream("a", "a"), stream("a", "b", "b"), stream("b")])
    told = {1: "the scorer hangs", 2: "the scorer hangs"}
    found = quality(batch, similarity)
    assert found.defined.tolist() == [[True, True, False], [True, False, False], [False] * 3]
    assert found.problems == told
    assert sequence_quality(batch, similarity).defined.tolist() == [True, False, False]
    assert sequence_quality(batch, similarity).problems == told
    process = process_quality(batch, similarity, 1.0, 1)  # the whole is missing, and so is every chunk's
    assert process.defined[:, 0].tolist() == [True, False, False] and process.problems == told
    scores = sentence_scores(batch, similarity, [1.0] * 3, 10.0)
    assert scores.defined_BS.tolist() == [[True, True, False], [True, False, False], [False] * 3]
    assert scores.problems == told


def test_standard_scores_are_those_of_the_population_and_of_all_ranks() -> None:
    whole = table(1, 2, 3, 4)
    expected = torch.tensor([-1.341641, -0.447214, 0.447214, 1.341641], dtype=torch.float64)
    assert torch.allclose(standardized(whole, table_moments(whole)), expected, atol=1e-6)
    masked = table(1, None, 2, 3, 4)
    assert torch.allclose(standardized(masked, table_moments(masked))[[0, 2, 3, 4]], expected, atol=1e-6)
    assert standardized(masked, table_moments(masked))[1] == 0
    first, second = table(1, 2, None), table(3, 4)
    moments = table_moments(first) + table_moments(second)
    ranks = torch.cat([standardized(first, moments)[:2], standardized(second, moments)])
    assert torch.equal(ranks, standardized(whole, table_moments(whole)))
    rare = table(1, 0, 0, 0)
    assert standardized(rare, table_moments(rare)).tolist() == pytest.approx([3**0.5, *[-(3**-0.5)] * 3])
    equal = table(0.1, 0.1, 0.1)
    assert standardized(equal, table_moments(equal)).tolist() == [0, 0, 0]
    assert standardized(table(None), table_moments(table(None))).tolist() == [0]


def test_groups_are_standardised_chunk_by_chunk() -> None:
    defined = torch.tensor([[True, True], [True, True], [True, False]])
    values = RewardTable(torch.tensor([[1.0, 5], [3, 5], [7, 2]]).double(), defined)
    found = standardized_in_groups(values, torch.tensor([0, 0, 1]), 2)
    assert found.tolist() == [[-1, 0], [1, 0], [0, 0]]


def test_seqpo_and_gated_of_the_reference_vectors() -> None:
    one = torch.zeros(5, dtype=torch.long)
    quality_B, latency_B = table(80, 82, 85, 79, 84), table(4, 5, 6, 3, 7)
    assert seqpo(quality_B, latency_B, one, 1).tolist() == pytest.approx(
        [-1.047009, 0, 1.924067, -1.631174, 0.339902], abs=1e-6
    )
    assert seqpo(quality_B, latency_B, one, 1, floor=0).tolist() == pytest.approx(
        [-1.754116, 0, 1.924067, -2.631174, 0.339902], abs=1e-6
    )
    # z(q) and z(L) of the same vectors: the weights are those of the two terms, each by itself
    alone = seqpo(quality_B, latency_B, one, 1, quality_weight=0.0, latency_weight=1.0)
    for weight in (0.0, 0.25, 3.0):
        weighed = seqpo(quality_B, latency_B, one, 1, quality_weight=2.0, latency_weight=weight)
        both = seqpo(quality_B, latency_B, one, 1, quality_weight=2.0, latency_weight=0.0) + weight * alone
        assert weighed.tolist() == pytest.approx(both.tolist(), abs=1e-9)
    assert alone.abs().max() > 1
    quality_BS = torch.tensor([[-3.0, -6], [-2, -4], [-8, -1]])
    latency_BS = torch.tensor([[1.5, 0.5], [2.5, 2], [0.4, 3]])
    assert gated_latency(quality_BS, latency_BS, -5, 10).tolist() == [[-8.5, 0], [-7.5, -8], [0, -7]]
    every_BS = torch.ones(3, 2, dtype=torch.bool)
    found = gated(quality_BS, latency_BS, every_BS, one[:3], 1)
    assert found.tolist() == pytest.approx([-0.954563, 2.111592, -1.157028], abs=1e-6)
    # groups do not touch one another: the same values beside another group
    twice = gated(
        quality_BS.repeat(2, 1), latency_BS.repeat(2, 1) * torch.tensor([1.0] * 3 + [2.0] * 3)[:, None],
        every_BS.repeat(2, 1), torch.tensor([0] * 3 + [1] * 3), 2,
    )  # fmt: skip
    assert twice[:3].tolist() == found.tolist()


def test_the_sum_has_rewards_of_streams_at_their_last_chunk() -> None:
    """Two streams of two chunks and of one; standard scores are over all that is defined."""
    exists_BT = torch.tensor([[True, True], [True, False]])
    last_BT = torch.tensor([[False, True], [True, False]])
    of_chunks = RewardTable(torch.tensor([[1.0, 2], [3, 0]]).double(), exists_BT)
    tables = {"a": of_chunks, "s": table(0, 4)}
    moments = {name: table_moments(each) for name, each in tables.items()}
    found = sum_z({"a": of_chunks}, {"s": tables["s"]}, {"a": 1.0, "s": 4.0}, moments, last_BT)
    z = 1.5**0.5
    assert found.flatten().tolist() == pytest.approx([-z, -4, z + 4, 0])


def test_grouped_rewards_compare_the_rollouts_of_a_stream_chunk_by_chunk() -> None:
    """Two streams of two rollouts; the second stream has one chunk less."""
    exists_BT = torch.tensor([[True, True], [True, True], [True, False], [True, False]])
    of_chunks = RewardTable(torch.tensor([[0.0, 2], [4, 2], [1, 0], [3, 0]]).double(), exists_BT)
    found = grouped(
        {"p": of_chunks},
        {"q": table(5, 9, 1, 1)},
        {"p": 2.0, "q": 0.5},
        exists_BT,
        torch.tensor([0, 0, 1, 1]),
        2,
    )
    assert found.tolist() == [[-2.5, -0.5], [2.5, 0.5], [-2, 0], [2, 0]]


def test_average_lagging_of_streams_is_that_of_the_reference_vectors() -> None:
    """V1, V2 and V7 of the facts, in chunks of 2 s; a silent stream is said at its end."""
    words = [f"w{number}" for number in range(6)]
    wait_3 = stream("", "", words[0], words[1], " ".join(words[2:5]), reference=words[:5])
    under = stream("", words[0], "", words[1], "", words[2], reference=words)
    batch = StreamBatch([stream(*words[:5]), wait_3, under, stream("", "", reference=["a", "b"])])
    found = lagging_latency(batch, "AL", [2.0] * 4)
    assert found.defined.all() and found.values.tolist() == pytest.approx([2, 6, 6, 4])


def test_sentences_have_their_own_quality_and_latency() -> None:
    """The second sentence is right and a chunk late, the third is not said."""
    reference = ["", "ein Haus", "", "am See", "", "und"]
    sampled = InterpretedStream(
        [says(text) if text else SILENCE for text in ["", "ein Haus", "", "", "am See", ""]],
        [says(text) if text else SILENCE for text in reference],
        [1, 3, 5],
    )
    found = sentence_scores(StreamBatch([sampled]), CHRF, [1.0], 10.0)
    assert found.defined_BS.all() and found.quality_BS.tolist() == [[1, 1, 0]]
    # a sentence of 2 s and two words, both at its end: the first word is at the source's end, AL ends there
    assert found.latency_BS.tolist() == [[2, 3, 10]]


def test_chinese_is_counted_by_characters() -> None:
    """A text without spaces has the scores of its characters as words with spaces between."""
    reference, said = ["", "你好", "", "世界"], ["", "你", "好世", "界"]
    whole = InterpretedStream([says(text) for text in said], [says(text) for text in reference], [1, 3])
    apart = InterpretedStream(
        [says(" ".join(text)) for text in said], [says(" ".join(text)) for text in reference], [1, 3]
    )
    by_character, by_word = StreamBatch([whole]), StreamBatch([apart])
    found = lagging_latency(by_character, "AL", [1.0], "character").values
    assert found.tolist() == lagging_latency(by_word, "AL", [1.0]).values.tolist()
    scores = sentence_scores(by_character, CHRF, [1.0], 10.0, "character")
    assert scores.quality_BS.tolist() == [[1, 1]]
    assert scores.latency_BS.tolist() == sentence_scores(by_word, CHRF, [1.0], 10.0).latency_BS.tolist()


def test_the_process_reward_mixes_what_was_due_with_the_whole() -> None:
    sampled = stream("eins", "", "zwei", "drei", reference=["eins", "", "zwei", "vier"])
    found = process_quality(StreamBatch([sampled]), CHRF, share=1.0, every=2).values[0]
    assert found[:2].tolist() == [1, 1]
    whole = sequence_quality(StreamBatch([sampled]), CHRF).values[0]
    assert found[2] == found[3] == whole < 1
    mixed = process_quality(StreamBatch([sampled]), CHRF, share=0.25, every=2).values[0]
    assert float(mixed[0]) == pytest.approx(0.25 + 0.75 * float(whole))


def test_credit_goes_from_action_to_action() -> None:
    """One token per action is the reference vector of GAE; more tokens share the credit of their action."""
    reward, value = torch.tensor([0.0, 0, 1]), torch.tensor([0.5, 0.4, 0.6])
    one = torch.zeros(3, dtype=torch.long)
    found = action_credit(reward, value, torch.arange(3), one, 1, 1.0, 0.95)
    assert found.advantage_T.tolist() == pytest.approx([0.451, 0.58, 0.4])
    assert found.return_T.tolist() == pytest.approx([0.951, 0.98, 1.0])
    action_T = torch.tensor([0, 0, 1, 2, 2, 2])
    reward_T = torch.tensor([-0.5, 0.5, 0, 0.25, 0.25, 0.5])
    value_T = torch.tensor([0.5, 9, 0.4, 0.6, 9, 9])
    shared = action_credit(reward_T, value_T, action_T, one, 1, 1.0, 0.95)
    assert torch.allclose(shared.advantage_T, found.advantage_T[action_T])
    assert torch.allclose(shared.return_T, found.return_T[action_T])


def test_actions_are_found_from_their_last_tokens() -> None:
    """Answers may be interleaved; the end of an answer ends its last action."""
    answer_T = torch.tensor([0, 1, 0, 0, 1, 1])
    action_T, answer_N = actions_of_tokens(torch.tensor([0, 3, 4]), answer_T, 2)
    assert action_T.tolist() == [0, 2, 1, 1, 2, 3]
    assert answer_N.tolist() == [0, 0, 1, 1]


def test_controllers_of_the_reference_vectors() -> None:
    measured = [12, 7, 6, 3, 0, 100]
    expected = {
        "proportional": [0.204, 0.2074, 0.2074, 0.203252, 0.19918696, 0.2031707],
        "exponential": [0.20404027, 0.20746944, 0.20746944, 0.20336127, 0.19933444, 0.20336127],
        "horizon": [0.200256, 0.20046961, 0.20046961, 0.20021301],
    }
    for name, coefficients in expected.items():
        controller = kl_controller(name, {"coefficient": 0.2, "target": 6.0})
        found = []
        for kl in measured[: len(coefficients)]:
            controller.update(kl, 64)
            found.append(float(controller.coefficient))
        assert found == pytest.approx(coefficients, abs=1e-6), name


# ---------------------------------------------------------------------------------- rankings of behaviours

REFERENCE = ["", "ein Haus", "", "", "am See", "", "", "und ein Baum", "", "", "", ""]
ENDS = [0, 3, 6]


def behaviours() -> dict[str, InterpretedStream]:
    """Silent, babbling (at every chunk), copying (the source's words), right, and right but three chunks late."""
    wanted = [says(text) if text else SILENCE for text in REFERENCE]
    source = ["", "a house", "", "", "at a lake", "", "", "and a tree", "", "", "", ""]
    late = ["", "", "", *REFERENCE[:-3]]
    made = {
        "silent": [""] * 12,
        "babbling": ["blah blub"] * 12,
        "copying": source,
        "right": REFERENCE,
        "late": late,
        "nonsense": ["".join("x" if c != " " else c for c in text) for text in REFERENCE],
    }
    return {
        name: InterpretedStream([says(text) if text else SILENCE for text in texts], wanted, ENDS)
        for name, texts in made.items()
    }


def totals(names: Sequence[str], rewards: Sequence[str], combine: str = "sum_z") -> dict[str, float]:
    """The summed reward of each behaviour, among a batch of these behaviours."""
    streams = [behaviours()[name] for name in names]
    batch = StreamBatch(streams)
    of_actions = {
        "detection": detection(batch), "initiative": initiative(batch), "quality": quality(batch, CHRF),
        "timing": timing(batch), "format": format_match(batch, r"[\w ]*"),
    }  # fmt: skip
    of_sequences = {
        "lag": lagging(batch, 1, "lag"), "sequence_quality": sequence_quality(batch, CHRF),
    }  # fmt: skip
    group_B = torch.zeros(len(streams), dtype=torch.long)
    total: Tensor
    if combine == "sum_z":
        moments = {name: table_moments(each) for name, each in {**of_actions, **of_sequences}.items()}
        total = sum_z(of_actions, of_sequences, dict.fromkeys(rewards, 1.0), moments, batch.last_BT()).sum(1)
    else:
        late_B = RewardTable(-of_sequences["lag"].values, of_sequences["lag"].defined)
        score_B = of_sequences["sequence_quality"]
        if combine == "seqpo":
            total = seqpo(score_B, late_B, group_B, 1)
        else:
            total = gated(
                score_B.values[:, None],
                late_B.values[:, None],
                late_B.defined[:, None],
                group_B,
                1,
                GateChoice(0.5, 10.0),
            )
    return dict(zip(names, total.tolist(), strict=True))


ALL = ["detection", "initiative", "quality", "timing", "format", "lag", "sequence_quality"]
STAGE_1 = ALL[:5]


@pytest.mark.parametrize("rewards", [STAGE_1, ALL], ids=["stage 1", "stage 2"])
def test_every_pair_of_behaviours_is_ranked_with_right_first(rewards: list[str]) -> None:
    """In every subset of the behaviours that has `right`, it is first; copying and silence are below."""
    names = ["silent", "babbling", "copying", "right", "late"]
    for count in range(2, 6):
        for subset in itertools.combinations(names, count):
            found = totals(subset, rewards)
            if "right" in subset:
                assert max(found, key=found.__getitem__) == "right", found
            if rewards is ALL and {"late", "silent"} <= set(subset):
                assert found["late"] > found["silent"], found


@pytest.mark.parametrize("combine", ["seqpo", "gated"])
def test_other_combinations_rank_right_first_too(combine: str) -> None:
    found = totals(["silent", "babbling", "copying", "right", "late"], [], combine)
    assert max(found, key=found.__getitem__) == "right", found
    assert found["late"] > found["silent"]


def test_timing_alone_rewards_nonsense_of_the_right_length_and_quality_does_not() -> None:
    names = ["nonsense", "right", "late"]
    hacked = totals(names, ["timing"])
    assert hacked["nonsense"] == max(hacked.values())
    repaired = totals(names, ["timing", "quality"])
    assert repaired["right"] == max(repaired.values())
    assert repaired["nonsense"] < repaired["right"] - 1


def test_run_does_not_tell_late_from_right_and_lag_does() -> None:
    names = ["right", "late"]
    batch = StreamBatch([behaviours()[name] for name in names])
    assert lagging(batch, 4, "run").values.tolist() == [0, 0]
    right, late = lagging(batch, 1, "lag").values.tolist()
    assert right == 0 > late

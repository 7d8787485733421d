"""The stage `train_interpreter`: PPO over streams learns when to speak and what, and refuses what are no streams."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from toy_streams import CHUNK, run_interpreter, save_toy_model, toy_stream, toy_template, write_streams

from audiollm.data.records.manifest import ManifestSource
from audiollm.data.records.part_codes import save_part_codes
from audiollm.data.records.sample import AudioPart, Message, Sample, TextPart, write_samples
from audiollm.errors import ConfigError, StageError
from audiollm.families.dual_ffn.policy import DualFFNPolicy
from audiollm.families.dual_ffn.rollouts import DualFFNRollouts
from audiollm.families.prompts import PromptedContents
from audiollm.families.rollout import Rollout, RolloutSettings
from audiollm.files.atomic import read_jsonl
from audiollm.generation.engine.request import SampledTokens
from audiollm.interpret.held_out_streams import read_streams
from audiollm.interpret.training.run import StreamMaker
from audiollm.interpret.training.settings import InterpreterTrainingConfig
from audiollm.interpret.training.stream_rewarder import StreamRewarder, actions_of, check_streams
from audiollm.models.dual_ffn import DualFFN
from audiollm.recipe.ranks import Ranks
from audiollm.recipe.stages import required
from audiollm.rl.online.prompts import Prompt
from audiollm.rl.rollouts.process import ProcessRollouts
from audiollm.supervised.saving import _stream_facts

REWARDS = {"detection": 1.0, "initiative": 1.0, "quality": 1.0, "lagging": 1.0, "sequence_quality": 1.0}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_toy_model(tmp_path)
    write_streams(tmp_path, 24)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("level", ["token", "step"])
def test_a_step_over_streams(folder: Path, level: str) -> None:
    """Behaviour and old agree across forced rows, the KL begins at 0, and the controller and figures are there."""
    kl = {"place": "reward", "controller": {"name": "proportional", "coefficient": 0.01, "target": 0.5}}
    out = run_interpreter(
        folder, rewards=REWARDS, advantage={"name": "gae", "steps": True, "level": level}, kl=kl
    )
    rows = [row for row in read_jsonl(out / "metrics.jsonl") if "reward" in row]
    for row in rows:  # the sum before standardisation: afterwards its mean is always 0
        parts = sum(
            weight * row.get(f"reward/{name}", 0.0) for name, weight in REWARDS.items() if name != "quality"
        )
        share = row["reward"] - parts  # quality, which not every stream has
        assert -1e-5 <= share <= row.get("reward/quality", 0.0) + 1e-5
    assert rows[0]["mismatch_kl"] < 1e-6
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-5)
    assert len({row["kl_weight"] for row in rows}) > 1
    assert {f"reward/{name}" for name in REWARDS} <= rows[0].keys()
    rollout = read_jsonl(out / "rollouts" / "000000.jsonl")[0]
    texts = toy_stream(int(rollout["id"][1:]))[1]
    assert len(rollout["steps"]) == len(texts)
    assert rollout["steps"][-1]["action"] == rollout["tokens"] - 1
    assert len(rollout["advantages"]) == rollout["tokens"]
    DualFFN.from_pretrained(out / "model")


def test_seqpo_weighs_quality_and_latency_as_the_rewards_say(folder: Path) -> None:
    source = ManifestSource(str(folder / "streams.jsonl"))
    samples = [source[0].sample] * 4
    template = toy_template()
    said = (["a", "", "b"], ["", "a", "b"], ["b", "b", ""], ["", "", "a"])
    rollouts = [taken(template, 0, list(words)) for words in said]
    opens = template.tokenizer.token_to_id("<|audio_out_bos|>")

    def rewards(quality: float, lagging: float) -> torch.Tensor:
        settings = {"combine": "seqpo", "group_size": 4}
        weights = {"sequence_quality": quality, "lagging": lagging}
        config = InterpreterTrainingConfig(samples="streams.jsonl", start=folder, rewards=weights, **settings)  # type: ignore[arg-type]
        rewarder = StreamRewarder(config, template.tokenizer, opens, 0.04, Ranks())
        return torch.tensor(rewarder(samples, rollouts, torch.zeros(4, dtype=torch.long))[0].total_A)

    quality, lagging = rewards(1.0, 1e-9), rewards(1e-9, 1.0)
    assert lagging.abs().max() > 0.5 and quality.abs().max() > 0.5
    torch.testing.assert_close(rewards(2.0, 0.25), 2 * quality + 0.25 * lagging, atol=1e-5, rtol=1e-5)


def test_standardised_rewards_of_two_ranks_are_those_of_one(folder: Path) -> None:
    config = InterpreterTrainingConfig(samples="streams.jsonl", start=folder, rewards=REWARDS)  # type: ignore[arg-type]
    source = ManifestSource(str(folder / "streams.jsonl"))
    samples = [source[index].sample for index in range(6)]
    template = toy_template()
    rollouts = [taken(template, index, ["a", "", "b"]) for index in range(6)]

    class Half(Ranks):
        """A rank whose sums have those of the other rank added."""

        def __init__(self, other: list[torch.Tensor]) -> None:
            super().__init__()
            self.other = other

        def sum(self, value: torch.Tensor) -> torch.Tensor:
            self.other.append(value)
            return value if len(self.other) < 3 else self.other[0] + self.other[1]

    opens = template.tokenizer.token_to_id("<|audio_out_bos|>")
    whole = StreamRewarder(config, template.tokenizer, opens, 0.04, Ranks())(
        samples, rollouts, torch.arange(6)
    )[1]
    shared: list[torch.Tensor] = []
    for part in (slice(0, 2), slice(2, 6)):  # what each rank adds
        StreamRewarder(config, template.tokenizer, opens, 0.04, Half(shared))(
            samples[part], rollouts[part], torch.arange(part.stop - part.start)
        )
    for part in (slice(0, 2), slice(2, 6)):
        ranks = Half(shared[:2])
        groups = torch.arange(part.stop - part.start)
        rewarder = StreamRewarder(config, template.tokenizer, opens, 0.04, ranks)
        own = rewarder(samples[part], rollouts[part], groups)[1]
        for rewards, expected in zip(own, whole[part], strict=True):
            assert [each.reward for each in rewards] == pytest.approx(
                [each.reward for each in expected], rel=1e-12
            )


def taken(template: object, number: int, words: list[str]) -> Rollout:
    """A rollout of a toy stream that says these words by turns."""
    tokenizer = template.tokenizer  # type: ignore[attr-defined]
    codes_KT, texts, _ = toy_stream(number)
    end = tokenizer.token_to_id("<|eot_id|>")
    ids: list[int] = []
    heard = []
    for place, chunk in enumerate(codes_KT.split(CHUNK, dim=1)):
        heard.append((len(ids), chunk))
        word = words[place % len(words)]
        ids += [*(tokenizer.encode(word, add_special_tokens=False).ids if word else []), end]
    assert len(heard) == len(texts)
    tokens = SampledTokens(
        "text",
        torch.tensor(ids),
        torch.ones(len(ids), dtype=torch.bool),
        (),
        (),
        torch.zeros(len(ids)),
        tuple(heard),
    )
    return Rollout(f"s{number}", 0, tokens, False, "", 0)


def test_actions_are_told_from_the_tokens_of_a_stream(folder: Path) -> None:
    template = toy_template()
    rollout = taken(template, 1, ["a", "", "b"])
    found = actions_of(rollout.tokens, template.tokenizer, -1, 0.04)
    count = len(toy_stream(1)[1])
    assert [each.action.text for each in found] == [["a", "", "b"][place % 3] for place in range(count)]
    assert found[-1].last == rollout.tokens.num_actions - 1
    assert all(before.last < after.last for before, after in pairwise(found))


def test_rollouts_do_not_depend_on_one_another(folder: Path) -> None:
    policy = DualFFNPolicy.load(folder)
    codes = [toy_stream(number)[0] for number in range(4)]
    prompts = [
        PromptedContents(
            f"{number}",
            [Message(role="user", content=[TextPart(text="a")])] * 2,
            [own],
            (),
            chunk_frames=CHUNK,
        )
        for number, own in enumerate(codes)
    ]
    settings = RolloutSettings(1, 0, answer="text", max_text_tokens=2)
    engine = DualFFNRollouts(policy.root.model, policy.template, max_slots=3)
    together = engine.sample(prompts, [[0, 1]] * 4, settings)
    for prompt, group in zip(prompts, together, strict=True):
        ((first, second),) = engine.sample([prompt], [[0, 1]], settings)
        assert torch.equal(first.tokens.ids_N, group[0].tokens.ids_N)
        assert torch.equal(second.tokens.ids_N, group[1].tokens.ids_N)
        assert not torch.equal(first.tokens.ids_N, second.tokens.ids_N)


SCORER = """
import json, os, pathlib, sys
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
for line in sys.stdin:
    if line.strip():
        row = json.loads(line)
        print(100 * (row["mt"] == row["ref"]) if row["ref"] != "b" else "sorry", flush=True)
"""
"""Fails at a reference that is the word b."""


def test_a_scorer_that_fails_is_told_and_ended(folder: Path) -> None:
    (folder / "score.py").write_text(SCORER)
    settings = {
        "similarity": f"command:{sys.executable} score.py scorer.pid", "rewards": {"detection": 1.0, "quality": 1.0},
        "group_size": 4,
    }  # fmt: skip
    out = run_interpreter(folder, **settings)
    rows = read_jsonl(out / "set_aside.jsonl")
    assert rows and {(row["place"], row["kind"]) for row in rows} == {("reward quality", "no reward")}
    assert all("the scorer answered 'sorry', which is no score" in row["reason"] for row in rows)
    assert len(list((out / "rollouts").glob("*.jsonl"))) == 10  # it went on
    with pytest.raises(ProcessLookupError):
        os.kill(int((folder / "scorer.pid").read_text()), 0)
    with pytest.raises(StageError, match="reward quality, sample .*'sorry'"):
        run_interpreter(folder, name="stops", on_error="stop", **settings)
    with pytest.raises(ProcessLookupError):
        os.kill(int((folder / "scorer.pid").read_text()), 0)


def test_streams_are_sampled_ahead(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All steps but the first are begun while the one before trains; the process samples what this one would."""
    begun: list[int] = []
    start = StreamMaker.start

    def counted(maker: StreamMaker, prompts: Sequence[Prompt], step: int) -> None:
        begun.append(step)
        start(maker, prompts, step)
        assert isinstance(maker._engine, ProcessRollouts) and len(maker._engine._started) == 1

    monkeypatch.setattr(StreamMaker, "start", counted)
    out = run_interpreter(folder, ahead=1, correction={"level": "token", "mode": "truncate"}, rewards=REWARDS)
    rows = [row for row in read_jsonl(out / "metrics.jsonl") if "reward" in row]
    assert begun == list(range(1, 10)) and rows[1]["mismatch_kl"] > rows[0]["mismatch_kl"]
    first = read_jsonl(out / "rollouts" / "000000.jsonl")
    here = read_jsonl(run_interpreter(folder, name="here", rewards=REWARDS) / "rollouts" / "000000.jsonl")
    assert [row["answer"] for row in first] == [row["answer"] for row in here]


def test_codes_of_another_length_than_the_actions_are_set_aside(folder: Path) -> None:
    """As those of another recording or codec; and what an open request would not hear."""
    samples = [ManifestSource(str(folder / "streams.jsonl"))[index].sample for index in range(24)]
    user = samples[0].messages[1]
    asked = user.model_copy(update={"content": [TextPart(text="a"), *user.content]})
    samples[0] = samples[0].model_copy(
        update={"messages": [samples[0].messages[0], asked, samples[0].messages[2]]}
    )
    save_part_codes(folder / "1.safetensors", toy_stream(1)[0][:, :-CHUNK])
    write_samples(folder / "streams.jsonl", samples)
    out = run_interpreter(folder, batch_size=22)
    rows = read_jsonl(out / "set_aside.jsonl")
    assert {row["stage"] for row in rows} == {"train_interpreter"}
    kinds = {row["id"]: row["kind"] for row in rows}
    assert kinds == {"s0": "no stream", "s1": "another number of chunks"}
    policy = DualFFNPolicy.load(folder)
    prompts, bad = read_streams(policy, folder / "streams.jsonl", "train", 100)
    assert len(prompts) == 20 and {each.id: each.kind for each in bad} == kinds


def test_the_copy_of_the_weights_that_sampled_is_let_go(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is the training's between two rollouts, as after answers that are no streams."""
    policy = DualFFNPolicy.load(folder)
    prompts, _ = read_streams(policy, folder / "streams.jsonl", "test", 1)
    engine = DualFFNRollouts(policy.root.model, policy.template)
    released: list[bool] = []
    monkeypatch.setattr(engine._decoder, "release", lambda: released.append(True))
    engine.sample([prompts[0].prompted], [[0]], RolloutSettings(1, 0, max_text_tokens=2))
    assert released == [True]


def test_a_training_notes_the_system_message_of_its_streams(folder: Path) -> None:
    """Live, the model is told the same; samples before the streams do not count."""

    class Survey:
        def used(self, place: int, held_out: bool) -> list[int]:
            return [0, 1]

    user = [Message(role="user", content=[TextPart(text="a")])]
    answered = [*user, Message(role="assistant", content=[TextPart(text="b")])]
    write_samples(folder / "texts.jsonl", [Sample(id="t", messages=answered, task="text")])
    sources = [ManifestSource(str(folder / name)) for name in ("texts.jsonl", "streams.jsonl")]
    facts = _stream_facts(sources, Survey())  # type: ignore[arg-type]
    assert facts == {"chunk_frames": CHUNK, "stream_prompt": "a b", "stream_speaks": False}
    lost = required(sources[1][0].sample.audio_parts()[0].codes)
    (folder / lost).unlink()  # while the training ran, which went on without it
    assert _stream_facts(sources, Survey()) == facts  # type: ignore[arg-type]
    assert set(_stream_facts(sources[:1], Survey()).values()) == {None}  # type: ignore[arg-type]
    said = [TextPart(text="b"), AudioPart(path="b.wav")]
    spoken = [*user, Message(role="assistant", content=said, chunk_frames=CHUNK)]
    sample = Sample(id="s", messages=spoken, task="interpret")
    write_samples(folder / "spoken.jsonl", [sample, sample])
    assert _stream_facts([ManifestSource(str(folder / "spoken.jsonl"))], Survey())["stream_speaks"]  # type: ignore[arg-type]


def test_what_cannot_be_trained_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'lagging'"):
        run_interpreter(folder, rewards={"lag": 1.0})
    with pytest.raises(ConfigError, match="does not read the rewards of actions"):
        run_interpreter(folder, advantage="grpo", critic=None, group_size=2)
    both = {"sequence_quality": 2.0, "lagging": 1.0}
    refused: list[tuple[dict[str, object], str]] = [
        ({"combine": "seqpo", "rewards": both}, "compares the rollouts of a stream: group_size is 1"),
        ({"combine": "seqpo", "group_size": 2}, "reads quality and latency"),
        ({"combine": {"name": "gated", "floor": 0.0}, "group_size": 2, "rewards": both}, "floor is of seqpo"),
        ({"latency": "AL"}, "latency is of seqpo"),
        ({"kl": {"audio": "fixed"}}, "kl.audio is set, and answer is text"),
        ({"similarity": "chrff"}, "chrff: no such scorer; did you mean 'chrf'"),
        ({"similarity": "command:"}, "names no program"),
        ({"pattern": "(a"}, "is no regular expression"),
        ({"rollouts": "vllm"}, "vllm answers whole prompts, and streams are open"),
    ]
    for settings, told in refused:
        with pytest.raises(ConfigError, match=told):
            run_interpreter(folder, **settings)
    config = InterpreterTrainingConfig(samples="streams.jsonl", start=folder, rewards=REWARDS)  # type: ignore[arg-type]
    plain = Sample(id="x", messages=[Message(role="assistant", content=[TextPart(text="a")])], task="t")
    with pytest.raises(StageError, match="'x' is no stream.*no chunk_frames"):
        check_streams([plain], config)
    unplaced = plain.model_copy(
        update={"messages": [Message(role="assistant", content=[TextPart(text="a")], chunk_frames=2)]}
    )
    with pytest.raises(StageError, match="source_ends"):
        check_streams([unplaced], config)
    check_streams([unplaced], config.model_copy(update={"waiting": "run"}))
    silent = Message(role="assistant", content=[TextPart(text="")], chunk_frames=2)
    check_streams([plain.model_copy(update={"messages": [silent]})], config)  # waits for nothing
    late = unplaced.model_copy(update={"metadata": {"source_ends": [1]}})
    with pytest.raises(StageError, match="chunks from 0 to 0"):
        check_streams([late], config)
    with pytest.raises(StageError, match="2 chunks for 1 segments"):
        check_streams([unplaced.model_copy(update={"metadata": {"source_ends": [0, 0]}})], config)
    spoken = Message(role="assistant", content=[TextPart(text="a"), AudioPart(path="a.wav")], chunk_frames=2)
    timed = config.model_copy(update={"rewards": {"timing": 1.0}})
    check_streams([unplaced], timed)  # says nothing, and is compared with 0 s
    of_speech = plain.model_copy(update={"messages": [spoken]})
    with pytest.raises(StageError, match="no metadata.durations_s"):
        check_streams([of_speech], timed)
    check_streams([of_speech.model_copy(update={"metadata": {"durations_s": [0.5]}})], timed)
    check_streams([of_speech], timed.model_copy(update={"rewards": {"detection": 1.0}}))
    wordless = spoken.model_copy(update={"content": [TextPart(text=""), spoken.content[1]]})
    with pytest.raises(StageError, match="no metadata.durations_s"):  # it would count as silence
        check_streams([plain.model_copy(update={"messages": [wordless]})], config)
    (folder / "streams.jsonl").write_text(
        Sample(
            id="q", messages=[Message(role="user", content=[TextPart(text="a")]), *plain.messages], task="t"
        ).model_dump_json()
        + "\n"
    )
    with pytest.raises(StageError, match="no chunk_frames"):
        run_interpreter(folder, name="plain")

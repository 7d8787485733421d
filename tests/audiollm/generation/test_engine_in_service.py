"""What a service asks of the engine: requests that rest, prompts read in pieces, a cache that grows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from audiollm.data.chat.template import Template
from audiollm.data.text import tokenizer as tokens
from audiollm.generation.engine.engine import Engine
from audiollm.generation.engine.request import Answer, Event, Finished, Frames, Limits, Request
from audiollm.models.dual_ffn import DualFFN
from tests.audiollm.generation.test_generation_engine import (
    BOOKS,
    GUIDED,
    PLAIN,
    SIZE,
    WORDS,
    random_model,
    request,
)


@pytest.fixture(scope="module")
def template() -> Template:
    return Template(tokens.train_text_tokenizer([WORDS] * 3, 280), BOOKS, SIZE)


@pytest.fixture(scope="module")
def model(template: Template) -> DualFFN:
    return random_model(template)


def alone(model: DualFFN, template: Template, request: Request) -> Answer:
    return Engine.sized_for(model, template, [request]).run([request])[0]


def requests() -> list[Request]:
    """Text, speech and both; plain and guided; of unequal prompts, one with a recording in it."""
    kinds = ("audio", "any", "text")
    return [request(n, sampling=(PLAIN, GUIDED)[n % 2], answer=kinds[n % 3]) for n in range(6)]


def same(answer: Answer, expected: Answer) -> bool:
    return answer.text == expected.text and torch.equal(answer.codes_KT, expected.codes_KT)


def run(engine: Engine, pauses: dict[int, range]) -> tuple[dict[int, Answer], list[list[Event]]]:
    """Take all steps; a request rests in the steps that `pauses` has for it."""
    answers: dict[int, Answer] = {}
    steps: list[list[Event]] = []
    while engine.busy and len(steps) < 300:
        for number, resting in pauses.items():
            engine.pause(number, len(steps) in resting)
        steps.append(engine.step())
        answers |= {event.request: event.answer for event in steps[-1] if isinstance(event, Finished)}
    return answers, steps


def test_requests_that_rest_answer_as_without_a_rest(model: DualFFN, template: Template) -> None:
    engine = Engine(model, template, slots=12, max_length=110)
    numbers = [engine.submit(asked) for asked in requests()]
    answers, steps = run(engine, {numbers[0]: range(3, 9), numbers[3]: range(0, 20), numbers[4]: range(5, 7)})
    assert not any(event.request == numbers[3] for events in steps[:20] for event in events)
    assert all(
        same(answers[n], alone(model, template, asked)) for n, asked in zip(numbers, requests(), strict=True)
    )


def test_all_requests_may_rest(model: DualFFN, template: Template) -> None:
    engine = Engine(model, template, slots=3, max_length=110)
    number = engine.submit(requests()[1])
    engine.pause(number)
    assert engine.step() == [] and not engine.acting and engine.busy
    engine.pause(number, False)
    assert same(run(engine, {})[0][number], alone(model, template, requests()[1]))


def test_a_long_prompt_is_read_in_pieces_between_the_steps_of_others(
    model: DualFFN, template: Template
) -> None:
    engine = Engine(model, template, slots=12, max_length=110, prefill_positions=5)
    speaking = [replace(request(n, answer="audio"), limits=Limits(max_frames=30)) for n in (0, 1)]
    first = [engine.submit(asked) for asked in speaking]
    while {event.request for event in engine.step() if isinstance(event, Frames)} != {*first}:
        pass
    long = request(5, sampling=GUIDED, answer="any")
    number = engine.submit(long)
    lengths: list[int] = []
    answers: dict[int, Answer] = {}
    while engine.busy:
        before = sum(engine._cache.lengths)
        events = engine.step()
        lengths.append(sum(engine._cache.lengths) - before)
        answers |= {event.request: event.answer for event in events if isinstance(event, Finished)}
    assert max(lengths) <= 5 + len(first) and lengths[0] == 5 + len(first)
    for asked, place in ((speaking[0], first[0]), (speaking[1], first[1]), (long, number)):
        assert same(answers[place], alone(model, template, asked))


def test_a_group_whose_prompt_is_read_in_pieces(model: DualFFN, template: Template) -> None:
    asked = request(5, sampling=PLAIN)
    engine = Engine(model, template, slots=2, max_length=110, prefill_positions=5)
    groups = engine.run_groups([(asked, [1, 2, 3])])
    for seed, answer in zip([1, 2, 3], groups[0], strict=True):
        assert same(answer, alone(model, template, replace(asked, seed=seed)))


def test_a_cache_grows_while_others_speak(model: DualFFN, template: Template) -> None:
    engine = Engine(model, template, slots=4, max_length=40, grows_to=700)
    first = engine.submit(requests()[0])
    for _ in range(4):
        engine.step()
    long = replace(request(2, sampling=PLAIN), limits=Limits(max_frames=300))
    second = engine.submit(long)
    answers, _ = run(engine, {})
    assert same(answers[first], alone(model, template, requests()[0]))
    assert same(answers[second], alone(model, template, long))
    with pytest.raises(ValueError, match="a slot has 700"):
        engine.submit(replace(long, limits=Limits(max_frames=700)))
    with pytest.raises(ValueError, match="it cannot grow"):
        Engine(model, template, steps="static", grows_to=700)

"""Answers of transformers' models side by side are those that `generate` gives alone; nobody waits for a long one."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from audiollm.audio import Waveform
from audiollm.families.answering import AnswerError, AnswerRequest
from audiollm.families.listener.answering import ListenerAnswers
from audiollm.families.listener.answering_rows import ListenerEngine, joins_rows
from audiollm.families.listener.generating import drawn_options, generate_ids
from audiollm.generation.engine.request import Answer, Finished, TextPiece
from audiollm.generation.engine.step_engine import Unanswered
from audiollm.models.audio_llms.inputs import InputsError, processor_inputs
from audiollm.models.audio_llms.loading import load_audio_llm
from tests.audiollm.families.higgs_v3_stt.tiny_higgs_stt import noise, write_tiny_higgs_stt
from tests.audiollm.models.tiny_audio_llms import TINY, save_tiny, tiny, voxtral

PIECE = 24
"""Positions of a prompt that are read in a step."""
CLASSES = [*sorted(set(TINY) - {"qwen2_5_omni"}), "voxtral", "higgs_v3_stt", "sliding"]


def small_model(name: str, folder: Path) -> tuple[Any, Any]:
    """A model that ends now and then when it is drawn from, with penalties in its generation config."""
    if name == "higgs_v3_stt":
        model, processor = load_audio_llm(write_tiny_higgs_stt(folder))
    elif name == "voxtral":
        torch.manual_seed(0)
        model, processor = voxtral()
        model.eval()
    else:
        model, processor = tiny("qwen2_audio" if name == "sliding" else name)
    if name == "sliding":  # the second layer looks back at ten positions
        text = model.config.text_config
        text.use_sliding_window, text.sliding_window = True, 10
        text.layer_types = ["full_attention", "sliding_attention"]
        model = type(model)(model.config).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(0.3)
    config = model.generation_config
    config.eos_token_id, config.pad_token_id = processor.tokenizer.eos_token_id, 0
    config.repetition_penalty, config.no_repeat_ngram_size = 1.3, 3
    return model, processor


@pytest.fixture(scope="module", params=CLASSES)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    return small_model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def hearer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    return small_model("qwen2_audio", tmp_path_factory.mktemp("hearer"))


def mixed_requests(processor: Any) -> list[AnswerRequest]:
    """Greedy and drawn, with and without a recording, of unequal prompts and lengths."""
    requests = []
    for number in range(8):
        recording = noise(1.05 + 0.1 * number, number)
        parts: list[Any] = ["What is said? " * number, recording]
        if "HiggsAudio3" in type(processor).__name__:
            parts = [recording]
        elif number % 3 == 2:
            parts = ["Hello. " * (1 + number)]
        temperature, top_p = [0.0, 1.0, 0.8][number % 3], [1.0, 0.9][number % 2]
        requests.append(AnswerRequest([("user", parts)], number, temperature, top_p, 12 + 6 * number))
    return requests


def inputs_of(processor: Any, request: AnswerRequest) -> dict[str, Tensor]:
    try:
        return processor_inputs(processor, request.turns, generation_prompt=True)
    except InputsError as error:
        raise AnswerError(error.reason) from error


def engine_of(subject: tuple[Any, Any], slots: int = 8, max_positions: int = 100_000) -> ListenerEngine:
    model, processor = subject
    return ListenerEngine(
        model, processor, lambda request: inputs_of(processor, request), slots, max_positions, PIECE
    )


def alone(subject: tuple[Any, Any], request: AnswerRequest) -> tuple[str, str]:
    """The text by `generate`, and why it ended."""
    model, processor = subject
    with torch.random.fork_rng():
        torch.manual_seed(request.seed)
        options = drawn_options(request.temperature, request.top_p)
        ids_1N = generate_ids(
            model, inputs_of(processor, request), max_new_tokens=request.max_tokens, **options
        )
    is_cut = ids_1N.shape[1] == request.max_tokens and ids_1N[0, -1] != processor.tokenizer.eos_token_id
    return str(processor.decode(ids_1N[0], skip_special_tokens=True)), "length" if is_cut else "end"


class Run:
    """The events of an engine that is given requests as soon as it takes them."""

    def __init__(self, engine: ListenerEngine) -> None:
        self.engine = engine
        self.answers: dict[int, Answer] = {}
        self.failures: dict[int, Exception] = {}
        self.pieces: dict[int, str] = {}
        self.ended: list[int] = []

    def step(self) -> list[Any]:
        events = list(self.engine.step())
        for event in events:
            if isinstance(event, TextPiece):
                self.pieces[event.request] = self.pieces.get(event.request, "") + event.text
            elif isinstance(event, Finished):
                self.answers[event.request] = event.answer
                self.ended.append(event.request)
            elif isinstance(event, Unanswered):
                self.failures[event.request] = event.error
        return events

    def finish(self) -> None:
        for _ in range(2000):
            if not self.engine.acting:
                return
            self.step()
        raise AssertionError("the engine does not come to an end")


def test_mixed_requests_with_cancels_answer_as_alone(subject: tuple[Any, Any]) -> None:
    """They come at random steps, and a third leave at random steps."""
    requests, draw = mixed_requests(subject[1]), random.Random(5)
    run, waiting = Run(engine_of(subject, slots=6)), list(enumerate(requests))
    draw.shuffle(waiting)
    places: dict[int, int] = {}
    leaving: dict[int, int] = {}
    steps = 0
    while waiting or run.engine.acting:
        while waiting and run.engine.can_take(waiting[0][1]) and draw.random() < 0.3:
            place, request = waiting.pop(0)
            number = run.engine.submit(request)
            places[number] = place
            if place in (1, 4, 6):
                leaving[number] = steps + draw.randrange(14)
        for number, step in leaving.items():
            if step == steps:
                run.engine.cancel(number)
        run.step()
        steps += 1
        assert steps < 2000
    stayed = {number for number in places if number not in leaving}
    assert stayed <= set(run.answers) and not run.failures
    for number, answer in run.answers.items():
        assert (answer.text, answer.reason) == alone(subject, requests[places[number]])
        assert run.pieces.get(number, "") == answer.text
    assert not run.engine._rows and run.engine._joined.cache is None


def test_every_class_joins(subject: tuple[Any, Any]) -> None:
    model, processor = subject
    for prompt in (["."], [noise(1.0)]):
        assert joins_rows(model, inputs_of(processor, AnswerRequest([("user", prompt)])))


def test_a_short_request_beside_a_long_one_ends_first(subject: tuple[Any, Any]) -> None:
    recording = noise(1.2)
    run = Run(engine_of(subject))
    subject[0].generation_config.min_new_tokens = 100
    long = run.engine.submit(AnswerRequest([("user", [recording])], 1, 1.0, max_tokens=200))
    while not run.engine._rows:
        run.step()
    short = AnswerRequest([("user", [noise(1.1, 3)])], 2, max_tokens=4)
    pieces = -(-inputs_of(subject[1], short)["input_ids"].shape[1] // PIECE)
    number = run.engine.submit(short)
    steps = 0
    while number not in run.answers:
        run.step()
        steps += 1
    subject[0].generation_config.min_new_tokens = None
    assert steps <= 1 + pieces + short.max_tokens and long not in run.answers


def decoder_lengths(model: Any, lengths: list[tuple[int, int]]) -> Any:
    """Note rows and positions of each pass of the decoder."""
    decoder = model.get_decoder()

    def note(_module: Any, _args: Any, arguments: dict[str, Any]) -> None:
        embedded = arguments.get("inputs_embeds")
        embedded = arguments["input_ids"] if embedded is None else embedded
        lengths.append(tuple(embedded.shape[:2]))

    return decoder.register_forward_pre_hook(note, with_kwargs=True)


def test_a_long_prompt_is_read_in_pieces_between_the_steps_of_others(subject: tuple[Any, Any]) -> None:
    """Each step gives a token to the answer under way, and reads no more than a piece."""
    model, processor = subject
    run = Run(engine_of(subject))
    model.generation_config.min_new_tokens = 40
    first = run.engine.submit(AnswerRequest([("user", [noise(1.2)])], 1, max_tokens=40))
    while not run.engine._rows:
        run.step()
    long = AnswerRequest([("user", ["word " * 40, noise(1.9)])], 2, max_tokens=5)
    if "HiggsAudio3" in type(processor).__name__:
        long = AnswerRequest([("user", [noise(29.0)])], 2, max_tokens=5)
    length = inputs_of(processor, long)["input_ids"].shape[1]
    number, lengths = run.engine.submit(long), list[tuple[int, int]]()
    handle = decoder_lengths(model, lengths)
    tokens_before, steps = run.engine._rows[0].ids_1N.shape[1], 0
    while len(run.engine._rows) < 2:
        run.step()
        steps += 1
    handle.remove()
    assert run.engine._rows[0].ids_1N.shape[1] == tokens_before + steps
    run.finish()
    prompt_lengths = [positions for rows, positions in lengths if positions > 1]
    if model.get_decoder() is model:  # a class that is its own decoder reads a prompt whole
        assert max(prompt_lengths) == length
    else:
        assert (
            steps > 3 and max(prompt_lengths[1:]) <= PIECE < length
        )  # the first pass ends before the decoder
    answers = [run.answers[first].text, run.answers[number].text]
    requests = [AnswerRequest([("user", [noise(1.2)])], 1, max_tokens=40), long]
    expected = [alone(subject, request)[0] for request in requests]
    model.generation_config.min_new_tokens = None
    assert answers == expected


def test_a_short_prompt_does_not_wait_for_all_of_a_long_one(hearer: tuple[Any, Any]) -> None:
    """Their pieces are read by turns, and the short request is answered while the long prompt is read."""
    run = Run(engine_of(hearer))
    long, short = (AnswerRequest([("user", ["word " * words])], max_tokens=4) for words in (200, 10))
    pieces = [-(-inputs_of(hearer[1], request)["input_ids"].shape[1] // PIECE) for request in (long, short)]
    first = run.engine.submit(long)
    run.step()
    second = run.engine.submit(short)
    steps = 0
    while second not in run.answers:
        run.step()
        steps += 1
    assert steps <= 2 * (1 + pieces[1]) + short.max_tokens < pieces[0] and not run.engine._rows
    run.finish()
    assert [run.answers[number].text for number in (first, second)] == [
        alone(hearer, request)[0] for request in (long, short)
    ]


def test_a_request_that_fails_leaves_the_others_alone(hearer: tuple[Any, Any]) -> None:
    run, good = Run(engine_of(hearer)), mixed_requests(hearer[1])[:2]
    too_short = AnswerRequest([("user", [Waveform(torch.zeros(1, 10), 16_000)])])
    impossible = AnswerRequest([("user", ["."])], temperature=1.0, top_p=-0.5)
    no_seed = AnswerRequest([("user", ["."])], seed=2**70, temperature=1.0)
    first = run.engine.submit(good[0])
    bad = [run.engine.submit(request) for request in (too_short, impossible, no_seed)]
    second = run.engine.submit(good[1])
    run.finish()
    assert set(run.failures) == set(bad)
    assert all(isinstance(error, AnswerError) for error in run.failures.values())
    assert "0.001 s long" in str(run.failures[bad[0]]) and "top_p" in str(run.failures[bad[1]])
    answers = [run.answers[number] for number in (first, second)]
    assert [(answer.text, answer.reason) for answer in answers] == [
        alone(hearer, request) for request in good
    ]


def test_a_request_without_room_waits_for_the_others(hearer: tuple[Any, Any]) -> None:
    """Rows are as long as the longest; one that needs more than all room is answered by itself."""
    texts = ["one", "two", "three " * 30, "four"]
    requests = [AnswerRequest([("user", [text])], number, 1.0, 1.0, 60) for number, text in enumerate(texts)]
    lengths = [inputs_of(hearer[1], request)["input_ids"].shape[1] + 60 for request in requests]
    room = 2 * max(lengths[:2]) + 10
    assert lengths[2] > room > 2 * lengths[3]
    run = Run(engine_of(hearer, max_positions=room))
    numbers = [run.engine.submit(request) for request in requests]
    together = set()
    while run.engine.acting:
        run.step()
        together.add(tuple(row.number for row in run.engine._rows))
    assert tuple(numbers[:2]) in together and all(len(rows) == 1 for rows in together if numbers[2] in rows)
    expected = [alone(hearer, request)[0] for request in requests]
    assert [run.answers[number].text for number in numbers] == expected


def test_slots_and_cancels_before_the_prompt_is_read(hearer: tuple[Any, Any]) -> None:
    run = Run(engine_of(hearer, slots=2))
    requests = mixed_requests(hearer[1])
    numbers = [run.engine.submit(request) for request in requests[:2]]
    assert not run.engine.can_take(requests[2])
    run.engine.cancel(numbers[1])
    assert run.engine.can_take(requests[2])
    run.engine.cancel(numbers[0])
    assert not run.engine.acting and run.engine.step() == []


def test_a_class_whose_later_steps_take_sound_does_not_join(hearer: tuple[Any, Any]) -> None:
    """Its `prepare_inputs_for_generation` gives each step a stretch of the recording."""
    model, processor = hearer
    inputs = inputs_of(processor, AnswerRequest([("user", [noise(1.0)])]))

    class Streaming(type(model)):  # type: ignore[misc]
        def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
            step_inputs = super().prepare_inputs_for_generation(*args, **kwargs)
            return {**step_inputs, "input_features": kwargs["input_features"]}

    published = model.__class__
    assert joins_rows(model, inputs)
    model.__class__ = Streaming
    try:
        assert not joins_rows(model, inputs)
    finally:
        model.__class__ = published


def change_beams(model: Any) -> None:
    model.generation_config.num_beams = 2


def change_class(model: Any) -> None:
    class OwnGenerate(type(model)):  # type: ignore[misc]
        def generate(self, *args: Any, **options: Any) -> Any:
            return super().generate(*args, **options)

    model.__class__ = OwnGenerate


def change_cache(model: Any) -> None:
    model.generation_config.cache_implementation = "static"


@pytest.mark.parametrize("change", [change_beams, change_class, change_cache])
def test_other_models_are_answered_one_after_the_other(change: Callable[[Any], None], tmp_path: Path) -> None:
    save_tiny("qwen2_audio", tmp_path)
    answers = ListenerAnswers(tmp_path)
    assert isinstance(answers.step_engine(2, 512, PIECE), ListenerEngine)
    change(answers._model)
    assert answers.step_engine(2, 512, PIECE) is None


def test_an_answer_of_the_folder_is_that_of_its_engine(tmp_path: Path) -> None:
    """`ListenerAnswers.answer` and the engine agree, penalties of generation_config.json included."""
    _, processor = save_tiny("qwen2_5_omni", tmp_path)
    answers = ListenerAnswers(tmp_path)
    engine = answers.step_engine(4, 512, PIECE)
    assert isinstance(engine, ListenerEngine)
    requests: Sequence[AnswerRequest] = mixed_requests(processor)[:4]
    run = Run(engine)
    numbers = [engine.submit(request) for request in requests]
    run.finish()
    expected = [answer.text for answer in answers.answer(requests)]
    assert [run.answers[number].text.strip() for number in numbers] == expected

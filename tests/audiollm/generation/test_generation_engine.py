"""The engine against a full forward for every row, without a cache, and against transformers' `generate`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from audiollm.data.chat.conditions import without_conditions
from audiollm.data.chat.template import Kind, Template, TokenStream
from audiollm.data.packing import pack
from audiollm.data.records.sample import AudioPart, Message, TextPart
from audiollm.data.text import tokenizer as tokens
from audiollm.generation.engine.engine import Engine
from audiollm.generation.engine.request import Answer, Finished, Frames, Limits, Request, TextPiece
from audiollm.generation.engine.rows import UNIFORM_STEPS, Running
from audiollm.generation.engine.sampling import SamplingConfig, guide, sample_codes
from audiollm.generation.engine.state import AnswerState, Marks
from audiollm.models import static_steps
from audiollm.models.decoder import DualFFNConfig
from audiollm.models.dual_ffn import DualFFN
from audiollm.models.static_steps import StaticSteps, StepKind

BOOKS, SIZE = 3, 16
WORDS = "system user assistant one two three"
GREEDY = SamplingConfig(temperature=0, text_guidance=1, speaker_guidance=1)
PLAIN = SamplingConfig(temperature=1, top_p=0.95, text_guidance=1, speaker_guidance=1)
GUIDED = SamplingConfig(temperature=0.9, top_k=9, top_p=1, text_guidance=2, speaker_guidance=1.5)
LIMITS = Limits(max_frames=12, max_text_tokens=14)


@pytest.fixture(scope="module")
def template() -> Template:
    return Template(tokens.train_text_tokenizer([WORDS] * 3, 280), BOOKS, SIZE)


@pytest.fixture(scope="module")
def model(template: Template) -> DualFFN:
    """Random, in float64 so that no tie hangs on rounding; its text opens speech and ends now and then."""
    return random_model(template)


def random_model(template: Template, **changes: Any) -> DualFFN:
    torch.manual_seed(2)
    config = DualFFNConfig(
        vocab_size=template.tokenizer.get_vocab_size() + 5,
        num_codebooks=BOOKS,
        codebook_size=SIZE + 2,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=48,
        norm_eps=1e-6,
    )
    model = DualFFN(replace(config, **changes)).eval().double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=0.3)
        for token, factor in ((tokens.AUDIO_OUT_BOS, 6), (tokens.END_OF_TURN, 4)):
            model.text_lm_head.weight[template.tokenizer.token_to_id(token)] *= factor
    return model


def request(number: int, **changes: Any) -> Request:
    """Prompts of unequal length, one in three with a recording in it."""
    system = [TextPart(text=f"Speaker: {'anna' * (1 + number % 2)}")]
    messages = [
        Message(role="system", content=system),
        Message(role="user", content=[TextPart(text="one two " * (number % 4) + "three")]),
    ]
    audio: list[torch.Tensor] = []
    if number % 3 == 2:
        heard = AudioPart(path="heard.wav")
        messages.insert(1, Message(role="user", content=[heard]))
        audio = [torch.randint(SIZE, (BOOKS, 4), generator=torch.Generator().manual_seed(number))]
    return Request(messages, number, audio, **{"sampling": GREEDY, "limits": LIMITS, **changes})


def slow_answer(model: DualFFN, template: Template, asked: Request) -> tuple[list[Any], str]:
    """The parts of an answer and why it ended: every row from a full forward, the rules written out in loops."""
    special = (*tokens.HEADER_STYLES["llama3"].special_tokens, tokens.AUDIO_DELAY)
    known = {name: template.tokenizer.token_to_id(name) for name in special}
    opens, closes, ends = (
        known[name] for name in (tokens.AUDIO_OUT_BOS, tokens.AUDIO_EOS, tokens.END_OF_TURN)
    )
    last_words = {ends, known[tokens.PAD]}
    forbidden = [token for token in known.values() if token not in last_words]
    if asked.answer == "any":
        forbidden.remove(opens)
    numbers = torch.rand(256, 2, BOOKS, generator=torch.Generator().manual_seed(asked.seed))
    opened = template.prompt if asked.answer == "audio" else template.text_prompt
    streams = [
        opened(*without_conditions(asked.messages, asked.audio, *hidden))
        for hidden in asked.sampling.branches
    ]
    bos, eos = [SIZE] * BOOKS, [SIZE + 1] * BOOKS
    parts: list[Any] = []
    rows: list[list[int]] = [bos]  # of the stretch of speech that goes on
    speaking, words, step, total = asked.answer == "audio", 0, 0, 0
    if speaking:
        streams = [with_row(stream, bos) for stream in streams]
        parts.append([])
    while True:
        hidden = [last_hidden(model, stream) for stream in streams]
        uniform, step = numbers[step][None], step + 1
        if not speaking:
            logits = model.text_logits(hidden[0]).float()
            logits[forbidden] = -torch.inf
            logits[template.tokenizer.get_vocab_size() :] = -torch.inf
            token = int(sample_codes(logits[None, None], asked.sampling, uniform[:, :, :1]))
            if token in last_words:
                return finished(parts, template), "end"
            words += 1
            if words > asked.limits.max_text_tokens or (token == opens and total == asked.limits.max_frames):
                return finished(parts, template), "length"
            if token == opens:
                streams = [with_row(with_token(stream, token), bos) for stream in streams]
                speaking, rows = True, [bos]
                parts.append([])
                step += 1  # what is drawn at <|audio_out_bos|> is not used
                continue
            if not parts or not isinstance(parts[-1], Words):
                parts.append(Words())
            parts[-1].append(token)
            streams = [with_token(stream, token) for stream in streams]
            continue
        audio = [model.audio_logits(each).float() for each in hidden]
        logits = audio[0]
        if len(audio) > 1:
            no_text = audio[1] if asked.sampling.text_guidance != 1 else None
            no_speaker = audio[-1] if asked.sampling.speaker_guidance != 1 else None
            logits = guide(logits, no_text, no_speaker, asked.sampling)
        logits[:, SIZE] = -torch.inf
        logits[1:, SIZE + 1] = -torch.inf
        if len(rows) == 1:
            logits[0, SIZE + 1] = -torch.inf
        row = sample_codes(logits[None], asked.sampling, uniform)[0].tolist()
        for k in range(BOOKS):
            if k >= len(rows):
                row[k] = SIZE
        firsts = [earlier[0] for earlier in rows]
        by_itself = row[0] == SIZE + 1 or SIZE + 1 in firsts
        if len(rows) > asked.limits.max_frames - total:
            row[0] = SIZE + 1
        if SIZE + 1 in [*firsts, row[0]]:
            end = [*firsts, row[0]].index(SIZE + 1)
            for k in range(BOOKS):
                if len(rows) >= end + k:
                    row[k] = SIZE + 1
            frames = end - 1
            by_itself = by_itself and frames < asked.limits.max_frames - total
        rows.append(row)
        streams = [with_row(stream, row) for stream in streams]
        if SIZE + 1 in [each[0] for each in rows] and len(rows) == frames + BOOKS:
            parts[-1] = [[rows[1 + t + k][k] for t in range(frames)] for k in range(BOOKS)]
            if asked.answer == "audio" or not by_itself:
                return finished(parts, template), "end" if by_itself else "length"
            total += frames
            streams = [with_token(with_row(stream, eos), closes) for stream in streams]
            speaking, step = False, step + 2


class Words(list[int]):
    """The ids of a stretch of text, decoded together: a letter may be several tokens."""


def finished(parts: list[Any], template: Template) -> list[Any]:
    decode = template.tokenizer.decode
    texts = [decode(part) if isinstance(part, Words) else part for part in parts]
    return [part for part in texts if part]


def last_hidden(model: DualFFN, stream: TokenStream) -> torch.Tensor:
    batch = pack([stream])
    hidden: torch.Tensor = model(batch)[batch.row_of_S][len(stream) - 1]
    return hidden


def with_token(stream: TokenStream, token: int) -> TokenStream:
    return extended(stream, token, [0] * BOOKS, Kind.TEXT)


def with_row(stream: TokenStream, codes: list[int]) -> TokenStream:
    return extended(stream, 0, codes, Kind.AUDIO_OUT)


def extended(stream: TokenStream, token: int, codes: list[int], kind: Kind) -> TokenStream:
    none = torch.full((1, BOOKS), -100)
    return replace(
        stream,
        text_ids_S=torch.cat([stream.text_ids_S, torch.tensor([token])]),
        codes_SK=torch.cat([stream.codes_SK, torch.tensor([codes])]),
        kinds_S=torch.cat([stream.kinds_S, torch.tensor([int(kind)])]),
        text_targets_S=torch.cat([stream.text_targets_S, none[0, :1]]),
        audio_targets_SK=torch.cat([stream.audio_targets_SK, none]),
    )


def told(answer: Answer) -> tuple[list[Any], str]:
    parts = [part if isinstance(part, str) else part.tolist() for part in answer.parts]
    return [part for part in parts if part], answer.reason


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("sampling", [GREEDY, PLAIN, GUIDED], ids=["greedy", "sampled", "guided"])
def test_the_engine_says_what_a_full_forward_for_every_row_says(
    template: Template, sampling: SamplingConfig, window: int | None
) -> None:
    """Speech, text and both, together in few slots, some waiting for others to end."""
    model = random_model(template, sliding_window=window)
    kinds = ("audio", "any", "text")
    asked = [request(n, sampling=sampling, answer=kinds[n % 3 if n < 6 else 1]) for n in range(9)]
    answers = Engine(model, template, slots=7, max_length=160).run(asked)
    for one, answer in zip(asked, answers, strict=True):
        with torch.inference_mode():
            parts, reason = slow_answer(model, template, one)
        assert told(answer) == (parts, reason)
    if sampling is PLAIN and window is None:  # what it is a test of did occur
        both = [a for a in answers if a.text and a.codes_KT.shape[1]]
        assert both and {a.reason for a in answers} == {"end", "length"}
        assert any(len([p for p in a.parts if not isinstance(p, str)]) > 1 for a in answers)


def test_alone_together_streamed_and_in_any_order_give_the_same(model: DualFFN, template: Template) -> None:
    """Each prompt its own way of sampling; slots are taken again by those that wait."""
    ways = [GREEDY, PLAIN, GUIDED, replace(PLAIN, ras_window=5)]
    kinds = ("audio", "any")
    asked = [request(n, sampling=ways[n % 4], answer=kinds[n % 2]) for n in range(10)]
    alone = [told(Engine.sized_for(model, template, [one]).run([one])[0]) for one in asked]
    assert len({str(each) for each in alone}) > 7
    for slots in (3, 5, 40):
        engine = Engine(model, template, slots, max_length=160)
        assert [told(each) for each in engine.run(asked)] == alone
        assert [told(each) for each in engine.run(asked[::-1])] == alone[
            ::-1
        ]  # again, over what is left there
        assert not engine.busy
    streamed = []
    for one in asked:
        *_, last = engine.stream(one)
        assert isinstance(last, Finished)
        streamed.append(told(last.answer))
    assert streamed == alone


def test_events_are_together_the_answer(model: DualFFN, template: Template) -> None:
    for number in range(6):
        asked = request(number, sampling=PLAIN, answer="any")
        events = list(Engine(model, template, 1, 160).stream(asked))
        answer = events[-1].answer if isinstance(events[-1], Finished) else None
        assert answer is not None
        assert "".join(event.text for event in events if isinstance(event, TextPiece)) == answer.text
        frames = [event for event in events if isinstance(event, Frames)]
        assert all(event.codes_KT.shape == (BOOKS, 1) for event in frames)
        speech = [part for part in answer.parts if isinstance(part, torch.Tensor)]
        for stretch, codes_KT in enumerate(speech):
            told_of = [event.codes_KT for event in frames if event.stretch == stretch]
            assert torch.equal(torch.cat(told_of, dim=1), codes_KT)
        assert (answer.first_frame_s is None) is (not speech)
        assert 0 <= (answer.first_frame_s or 0) <= answer.seconds


def test_a_frame_comes_as_soon_as_its_last_codebook_has(model: DualFFN, template: Template) -> None:
    """The first one with the K-th step, counted from the row that is all BOS; then one a step."""
    engine = Engine(model, template, 1, 160)
    engine.submit(request(1, sampling=GREEDY, limits=Limits(max_frames=5)))
    steps = []
    while engine.busy:
        steps.append([type(event) for event in engine.step()])
    assert steps[: BOOKS - 1] == [[]] * (BOOKS - 1)
    assert steps[BOOKS - 1 : -1] == [[Frames]] * (len(steps) - BOOKS) and steps[-1] == [Frames, Finished]


def test_codes_are_in_range_and_no_control_token_is_written(model: DualFFN, template: Template) -> None:
    hot = SamplingConfig(temperature=20, top_p=1, text_guidance=1, speaker_guidance=1)
    asked = [request(n, sampling=hot, answer="any", limits=Limits(40, 300)) for n in range(12)]
    asked += [request(n, sampling=hot) for n in range(12)]
    answers = Engine.sized_for(model, template, asked).run(asked)
    spoken = [a.codes_KT for a in answers if a.codes_KT.shape[1]]
    assert all(int(each.min()) >= 0 and int(each.max()) < SIZE for each in spoken)
    lengths = {a.codes_KT.shape[1] for a in answers[12:]}
    assert max(lengths) <= 12 and min(lengths) >= 1 and len(lengths) > 1
    assert {a.stopped for a in answers[12:]} == {True, False}
    assert all(a.stopped or a.codes_KT.shape[1] == 12 for a in answers[12:])
    assert all("<|" not in a.text for a in answers) and sum(len(a.text) for a in answers) > 100


def test_greedy_codes_are_those_of_transformers(template: Template) -> None:
    """`generate` with prompts padded on the left; up to where the engine's first codebook ends at its limit."""
    model, frames = random_model(template, codebook_size=SIZE + 2).float(), 30
    with torch.no_grad():  # transformers may draw BOS, and takes any codebook's EOS for the end
        model.audio_lm_head.weight.view(BOOKS, SIZE + 2, -1)[:, SIZE:] = 0
    asked = [request(n, limits=Limits(max_frames=frames)) for n in (0, 1, 3, 4)]
    peer = transformers_model(model, template)
    rows = [template.prompt(each.messages).text_ids_S for each in asked]
    longest = max(len(row) for row in rows)
    assert min(len(row) for row in rows) < longest
    out_BFK = peer.generate(
        input_ids=torch.stack([torch.nn.functional.pad(row, (longest - len(row), 0)) for row in rows]),
        attention_mask=torch.stack([torch.arange(longest) >= longest - len(row) for row in rows]).long(),
        max_new_tokens=frames + BOOKS,
        do_sample=False,
    )
    for answer, theirs_FK in zip(Engine(model, template, 4, 160).run(asked), out_BFK, strict=True):
        theirs = torch.stack([theirs_FK[1 + k : 1 + k + frames, k] for k in range(BOOKS)])
        same = frames - BOOKS
        assert torch.equal(answer.codes_KT[:, :same], theirs[:, :same])
        assert len(answer.codes_KT.unique()) > 5


def transformers_model(model: DualFFN, template: Template) -> Any:
    transformers = pytest.importorskip("transformers")
    ours, token_to_id = model.config, template.tokenizer.token_to_id
    config = transformers.HiggsAudioV2Config(
        vocab_size=ours.vocab_size,
        hidden_size=ours.hidden_size,
        intermediate_size=ours.intermediate_size,
        num_hidden_layers=ours.num_layers,
        num_attention_heads=ours.num_heads,
        num_key_value_heads=ours.num_kv_heads,
        head_dim=ours.head_dim,
        rms_norm_eps=ours.norm_eps,
        num_codebooks=BOOKS,
        codebook_size=SIZE + 2,
        audio_token_id=token_to_id(tokens.AUDIO_OUT),
        audio_delay_token_id=token_to_id(tokens.AUDIO_DELAY),
        audio_bos_token_id=token_to_id(tokens.AUDIO_OUT_BOS),
        audio_stream_bos_id=SIZE,
        audio_stream_eos_id=SIZE + 1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=token_to_id(tokens.END_OF_TURN),
        rope_parameters={"rope_type": "default", "rope_theta": ours.rope_theta},
        attn_implementation="sdpa",
    )
    peer = transformers.HiggsAudioV2ForConditionalGeneration(config, use_text_head=True)
    peer.load_state_dict(model.state_dict())
    return peer.eval()


def test_what_does_not_fit_is_refused(model: DualFFN, template: Template) -> None:
    engine = Engine(model, template, slots=2, max_length=64)
    with pytest.raises(ValueError, match=r"may take \d+ positions, a slot has 64"):
        engine.submit(request(1, limits=Limits(max_frames=60)))
    with pytest.raises(ValueError, match="3 branches, and there are 2 slots"):
        engine.submit(request(1, sampling=GUIDED))
    with pytest.raises(ValueError, match="more audio parts than codes"):
        engine.submit(replace(request(2), audio=[]))
    assert not engine.busy and engine.step() == []


def test_a_cancelled_request_gives_its_slots_back_and_changes_no_other(
    model: DualFFN, template: Template
) -> None:
    asked = [request(n, sampling=PLAIN, answer="any") for n in (3, 4, 5)]
    wanted = told(Engine(model, template, 1, 160).run([asked[2]])[0])
    engine = Engine(model, template, slots=2, max_length=160)
    first, second, third = (engine.submit(each) for each in asked)
    engine.step()
    engine.cancel(first)
    engine.cancel(third + 1)
    answers = {}
    while engine.busy:
        answers |= {e.request: e.answer for e in engine.step() if isinstance(e, Finished)}
    assert answers.keys() == {second, third} and told(answers[third]) == wanted
    stream = engine.stream(asked[0])
    next(stream)
    stream.close()
    assert not engine.busy


def test_the_numbers_of_an_answer_go_on_and_never_repeat(template: Template) -> None:
    """They are made for so many steps at a time; together they are one sequence from the seed."""
    asked = request(7)
    state = AnswerState(Marks.of(template), template.tokenizer, asked.answer, LIMITS, 10, None)
    running = Running(1, asked, [], state, 0.0, torch.Generator().manual_seed(asked.seed))
    drawn_S2K = torch.stack([running.next_uniform_2K() for _ in range(3 * UNIFORM_STEPS)])
    assert len(drawn_S2K.unique(dim=0)) == 3 * UNIFORM_STEPS
    generator = torch.Generator().manual_seed(7)
    assert torch.equal(drawn_S2K, torch.rand(drawn_S2K.shape, generator=generator))


def varied_requests() -> list[list[Request]]:
    """Speech alone, text alone, and both by turns, with answers and prompts of many lengths."""
    kinds, ways = ("audio", "text", "any"), (GREEDY, PLAIN, GUIDED)
    return [
        [request(n, answer=kind, sampling=ways[n % 3], limits=Limits(4 + 3 * n, 5 + 2 * n)) for n in range(5)]
        for kind in kinds
    ]


def answers_by(model: DualFFN, template: Template, steps: StepKind) -> list[Any]:
    engine = Engine(model, template, slots=12, max_length=110, steps=steps)
    return [told(answer) for requests in varied_requests() for answer in engine.run(requests)]


@pytest.mark.parametrize("window", [None, 9])
def test_steps_in_static_shapes_give_the_same(
    template: Template, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and spans are filled up, and several of both are met."""
    monkeypatch.setattr(static_steps, "SPAN", 8)
    shapes: list[tuple[int, int, bool]] = []
    step_of = StaticSteps._step_of

    def record_shape(steps: StaticSteps, rows: int, span: int, is_text: bool) -> Any:
        shapes.append((rows, span, is_text))
        return step_of(steps, rows, span, is_text)

    monkeypatch.setattr(StaticSteps, "_step_of", record_shape)
    model = random_model(template, sliding_window=window)
    assert answers_by(model, template, "static") == answers_by(model, template, "plain")
    for numbers, least in zip(zip(*shapes, strict=True), (3, 3, 2), strict=True):
        assert len(set(numbers)) >= least


def test_static_steps_follow_weights_that_were_written_or_moved(template: Template) -> None:
    model = random_model(template)
    asked = [request(0, answer="audio")]
    engine = Engine(model, template, slots=3, max_length=110, steps="static")
    for change in (
        lambda: model.model.layers[0].mlp.down_proj.weight.data.mul_(-1),
        lambda: setattr(model.model.norm, "weight", torch.nn.Parameter(-model.model.norm.weight)),
    ):
        before = told(engine.run(asked)[0])
        change()
        model.weights_changed()
        after = told(engine.run(asked)[0])
        assert before != after == told(Engine(model, template, slots=3, max_length=110).run(asked)[0])


def test_graphs_are_refused_without_a_gpu(model: DualFFN, template: Template) -> None:
    with pytest.raises(ValueError, match="'cuda_graph' needs a CUDA device, and the model is on cpu"):
        Engine(model, template, steps="cuda_graph")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_replayed_graphs_give_the_same(template: Template, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_steps, "SPAN", 16)
    model = random_model(template).cuda()
    assert answers_by(model, template, "cuda_graph") == answers_by(model, template, "plain")

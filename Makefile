# Two commands do everything on a fresh machine: `make quickstart` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# for benchmarks that load torch before audiollm, which sets it: waiting threads sleep
export OMP_WAIT_POLICY ?= passive
READY := $(VENV)/.ready

.PHONY: help setup quickstart test mutants prove check bench learn time-to-voice learn-tokenizer learn-tts learn-vae learn-cloning learn-understanding learn-preference compare-preference learn-tts-preference learn-grpo compare-rl learn-tts-grpo learn-interpret learn-interpret-speech learn-flow learn-audiocot learn-recipes tokenizer-speed long-audio packing loss-memory loader gpu llm-generate interpret-speed interpret-long dual-ffn-overhead llm-train flow seams dpo grpo annotate-speed annotate-quality audiocot-speed audiocot-names studio-check pages-check studio-speed busy-neighbour clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:[^#]*## /\t/' | expand -t 21

setup: $(READY)  ## make .venv and install everything (once)

$(READY): pyproject.toml
	@echo "==> Setting up $(VENV): about 7 GB, 3 minutes and more on a slow line; only done once"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	@# weights that tell speakers apart; what the package itself depends on has to be compiled, and is not used
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps resemblyzer==0.1.4
	@# librosa compiles at its first import; two processes that do so at once crash later (numba issue 10128)
	@$(BIN)/python -c 'from librosa import pyin; from librosa.onset import onset_detect'
	@touch $(READY)
	@echo "==> Installed"

quickstart: $(READY)  ## from raw audio to a spoken, scored sample: runs/quickstart/report.html
	@echo "==> Running recipes/quickstart.yaml (stages that are done are skipped)"
	@$(BIN)/audiollm run recipes/quickstart.yaml
	@echo "==> Open runs/quickstart/report.html; the figures are in runs/quickstart/summary.json"

test: $(READY)  ## pass the tests
	@echo "==> Running the tests"
	@$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder --durations=60

mutants: $(READY)  ## injected bugs, one at a time in a copy: which ones the tests notice: ONLY=, JOBS= (20 minutes)
	@$(BIN)/python tests/mutants/mutate.py --only '$(ONLY)' --jobs $(or $(JOBS),2)

prove: $(READY)  ## the longer proofs: killed in every stage, the judges on real digits
	@$(BIN)/python -m pytest -m slow

check: $(READY)  ## ruff, mypy and the import contract
	@echo "==> ruff, mypy, import contract"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

time-to-voice: $(READY)  ## minutes from raw recordings to speech that is understood (AUDIO=, TRANSCRIPTS=, TEST=)
	@$(BIN)/python benchmarks/time_to_voice.py $(if $(AUDIO),--audio $(AUDIO)) \
		$(if $(TRANSCRIPTS),--transcripts '$(TRANSCRIPTS)') $(if $(TEST),--test '$(TEST)')

learn-tokenizer: $(READY)  ## our tokenizer against EnCodec's architecture, the same CPU time: DATA=, MINUTES= (2 hours)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[metrics]'
	@$(BIN)/python -W ignore benchmarks/learn_tokenizer.py --data $(or $(DATA),../shared/data) \
		$(if $(MINUTES),--minutes $(MINUTES))

learn-vae: $(READY)  ## the continuous autoencoder's pitch and waveform: phase band, harmonic source, both, neither: DATA=, MINUTES= (40 minutes)
	@$(BIN)/python -W ignore benchmarks/learn_vae.py $(if $(DATA),--data $(DATA)) $(if $(MINUTES),--minutes $(MINUTES))

learn-tts: $(READY)  ## spoken digits in six voices, three seeds: what is said, whose voice: DATA= (half an hour)
	@$(BIN)/python -W ignore benchmarks/learn_tts.py $(if $(DATA),--data $(DATA))

learn-cloning: $(READY)  ## voices never heard, cloned: one of six speakers left out, six times: DATA= (about 65 minutes)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps pyworld-prebuilt
	@$(BIN)/python -W ignore benchmarks/learn_cloning.py $(if $(DATA),--data $(DATA))

learn-understanding: $(READY)  ## spoken digits and sounds written down, alone and beside speaking in one model: DATA= (an hour)
	@$(BIN)/python -W ignore benchmarks/learn_understanding.py $(if $(DATA),--data $(DATA))

learn-preference: $(READY)  ## preferences between answers to questions about recordings never heard, with controls: DATA= (an hour)
	@OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/learn_preference.py $(if $(DATA),--data $(DATA))

compare-preference: $(READY)  ## methods of preference learning at equal steps, and the length of their answers: DATA= (an hour)
	@OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/compare_preference.py $(if $(DATA),--data $(DATA))

learn-tts-preference: $(READY)  ## preferences between spoken digits that a recognizer ranks, with controls: DATA= (an hour, and the tokenizer of learn-tts)
	@OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/learn_tts_preference.py $(if $(DATA),--data $(DATA))

learn-grpo: $(READY)  ## rewards teach a model that listens and thinks, recordings never heard, with controls: DATA= (an hour)
	@OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/learn_grpo.py $(if $(DATA),--data $(DATA))

compare-rl: $(READY)  ## methods of reinforcement learning at equal rollouts, process rewards, adaptive KL: DATA= (an hour)
	@OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/compare_rl.py $(if $(DATA),--data $(DATA))

learn-tts-grpo: $(READY)  ## rewards on what is heard teach a model that speaks, with a control: DATA= (an hour, and the tokenizer of learn-tts)
	@OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/learn_tts_grpo.py $(if $(DATA),--data $(DATA))

learn-interpret: $(READY)  ## rewards teach an interpreter to wait no longer than it must, recordings never heard, with controls: DATA=, SEEDS= (four hours of one core)
	@OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/learn_interpret.py $(if $(DATA),--data $(DATA)) \
		$(if $(SEEDS),--seeds $(SEEDS))

learn-interpret-speech: $(READY)  ## spoken digits answered in German order, in the voice that is heard, recordings never heard: DATA=, SEED=, SOURCE=runs/learn_tts (75 minutes of one core)
	@OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/learn_interpret_speech.py $(if $(DATA),--data $(DATA)) \
		$(if $(SEED),--seed $(SEED)) $(if $(SOURCE),--source $(SOURCE))

learn-flow: $(READY)  ## sounds from video, words and thought, and edits, of recordings never heard: DATA=, SEEDS="1 2 3", CONTROLS=1 (two hours)
	@OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/learn_flow.py $(if $(DATA),--data $(DATA)) $(if $(SEEDS),--seeds $(SEEDS)) $(if $(CONTROLS),--controls)

learn-audiocot: $(READY)  ## a model writes chains of thought of scenes never heard, with controls; sounds and edits from them: DATA=, SEEDS=, FLOW=runs/learn_flow (two and a half hours of one core)
	@OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/learn_audiocot.py $(if $(DATA),--data $(DATA)) $(if $(SEEDS),--seeds $(SEEDS)) $(if $(FLOW),--flow $(FLOW))

learn-recipes: $(READY)  ## every tiny.yaml from nothing, before against after: ONLY="align rlhf", SEEDS="1 2 3", PLACES="alone busy digits", DATA= (many hours for all of it)
	@OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/learn_recipes.py $(if $(ONLY),--only $(ONLY)) $(if $(SEEDS),--seeds $(SEEDS)) \
		$(if $(PLACES),--places $(PLACES)) $(if $(DATA),--data $(DATA))

tokenizer-speed: $(READY)  ## CPU-seconds and memory against Mimi and Higgs at published shapes
	@$(BIN)/python -W ignore benchmarks/tokenizer_speed.py

long-audio: $(READY)  ## one hour through the tokenizer: memory, seams
	@$(BIN)/python benchmarks/long_audio.py

learn: learn-tokenizer learn-vae learn-tts learn-cloning learn-understanding learn-preference compare-preference learn-tts-preference learn-grpo compare-rl learn-tts-grpo learn-interpret learn-interpret-speech learn-flow learn-audiocot  ## every proof that a model learns

packing: $(READY)  ## trained tokens per CPU-second: packed, sorted, padded
	@$(BIN)/python benchmarks/packing.py

loss-memory: $(READY)  ## peak memory of the chunked loss against the dense one
	@$(BIN)/python benchmarks/loss_memory.py

loader: $(READY)  ## samples a second from shards, and opening a million samples: DATA=
	@$(BIN)/python benchmarks/loader.py $(if $(DATA),--data $(DATA))

dual-ffn-overhead: $(READY)  ## a training step of DualFFN against one feed-forward alone: DATA=
	@$(BIN)/python -W ignore benchmarks/dual_ffn_overhead.py $(if $(DATA),--data $(DATA))

llm-train: $(READY)  ## trained tokens per CPU-second against transformers' Higgs Audio V2, padded: DATA=
	@$(BIN)/python -W ignore benchmarks/llm_train.py $(if $(DATA),--data $(DATA))

gpu: $(READY)  ## one H100 or H200 in bf16: steps, tokens, frames, streams, MFU, memory, and peers: CASES=, TINY=1 (15 minutes)
	@$(BIN)/python -W ignore benchmarks/gpu.py $(if $(CASES),--cases $(CASES)) $(if $(TINY),--tiny)

flow: $(READY)  ## a step, sampling and memory of the flow-matching models against the class of the package thinksound: THINKSOUND= (a folder for its code)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(or $(THINKSOUND),build/thinksound) thinksound==0.0.19
	@OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/flow.py --thinksound $(or $(THINKSOUND),build/thinksound)

seams: $(READY)  ## are borders of edits heard? flux at them on real tracks, through decoders with and without phase: DATA=
	@OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/seams.py $(if $(DATA),--data $(DATA))

dpo: $(READY)  ## a step of DPO against TRL's DPOTrainer: CPU-seconds, memory; log-probabilities at a large vocabulary (20 minutes)
	@$(BIN)/python -W ignore benchmarks/dpo.py

grpo: $(READY)  ## a step of GRPO against TRL's GRPOTrainer: CPU-seconds, memory, phases, a group, with audio (10 minutes)
	@OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/grpo.py

annotate-speed: $(READY)  ## what the annotation costs: engine over steps, two workers, hours by step, a 3-hour file: DATA=
	@OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/annotate.py $(if $(DATA),--data $(DATA))

audiocot-speed: $(READY)  ## what chains of thought cost: engine over steps, hours by step, two workers: DATA=
	@OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/audiocot.py $(if $(DATA),--data $(DATA))

audiocot-names: $(READY)  ## names in records that are measured, ESC-10 with YAMNet: right ones, clips without: DATA=, FOLDS="3 4" (1 minute)
	@OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/audiocot_names.py $(if $(DATA),--data $(DATA)) $(if $(FOLDS),--folds $(FOLDS))

annotate-quality: $(READY)  ## how good annotations are: votes, trusted text, sound events, speaker turns, noise and room, duplicates: DATA=, REAL= (folder with whisper-base, whisper-tiny.en)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check pyannote.metrics
	@for each in consensus events speaker_turns quality duplicates; do \
		OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/$$each.py $(if $(DATA),--data $(DATA)) || exit 1; done
	@OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/text_trust.py $(if $(DATA),--data $(DATA)) \
		$(if $(REAL),--recognizer faster_whisper=$(REAL)/whisper-base/ctranslate2 --recognizer transformers=$(REAL)/whisper-tiny.en)

studio-check: $(READY)  ## the studio in a real Chromium, with screens: SCREENS= (apt-get install chromium; 12 minutes)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check 'gradio>=6,<7' playwright
	@npm install --silent --no-save --prefix build/axe axe-core || echo "without npm, axe-core is left out"
	@# make expands every line before it runs the first: only the shell sees what npm has just installed
	@# pytest ends with 5 where all of it was skipped: -rs has told why, and that is no failure
	@axe=build/axe/node_modules/axe-core/axe.min.js; test -f $$axe || axe=; \
		STUDIO_SCREENS=$(or $(SCREENS),build/screens) STUDIO_AXE=$$axe \
		$(BIN)/python -m pytest -m slow -rs $(addprefix tests/pipelines/studio/,test_studio_browser.py test_studio_whole_way.py test_studio_page.py test_studio_tabs.py test_studio_day.py test_studio_live_browser.py) \
		|| test $$? -eq 5

pages-check: $(READY)  ## every kind of page in a real Chromium: contrast, keyboard, nothing cut: SCREENS= (apt-get install chromium; 2 minutes)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check playwright
	@npm install --silent --no-save --prefix build/axe axe-core || echo "without npm, axe-core is left out"
	@PAGES_SCREENS=$(SCREENS) $(BIN)/python -m pytest -m '' -rs tests/pipelines/report/test_pages.py

studio-speed: $(READY)  ## the studio: click to sound against a new process, the waveform of an hour, memory (10 minutes)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check 'gradio>=6,<7' playwright
	@OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/studio.py

bench: time-to-voice tokenizer-speed long-audio packing loss-memory loader llm-generate interpret-speed interpret-long dual-ffn-overhead llm-train flow seams dpo grpo annotate-speed annotate-quality audiocot-speed audiocot-names studio-speed busy-neighbour  ## every benchmark; each prints JSON lines

busy-neighbour: $(READY)  ## CPU-seconds of a training, alone and beside one busy process
	@$(BIN)/python benchmarks/busy_neighbour.py

interpret-speed: $(READY)  ## the live loop and rollouts of streams against transformers' Kyutai STT, Moshi and Llama (10 minutes)
	@OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/interpret.py

interpret-long: $(READY)  ## two hours of spoken digits through the live loop: memory, CPU per chunk, right groups: DATA=, MODEL=, PROMPT=, MINUTES= (an hour)
	@OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/interpret_long.py $(if $(DATA),--data $(DATA)) \
		$(if $(MODEL),--model $(MODEL)) $(if $(PROMPT),--prompt '$(PROMPT)') $(if $(MINUTES),--minutes $(MINUTES))

llm-generate: $(READY)  ## audio frames per second against transformers' generate, first-audio latency
	@$(BIN)/python -W ignore benchmarks/llm_generate.py

clean:  ## remove the environment and caches (never runs/)
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

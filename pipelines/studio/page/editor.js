// The sound editor of the studio. It talks to its own server alone; `page` names this window, whose requests are
// stopped when it is closed. A window keeps its name when it is loaded again.
(() => {
  "use strict";
  let page = "";
  const state = { project: null, version: null, other: null, hearsOther: false, cursor: 0, view: [0, 1], span: null, edits: [],
    clicks: [], region: [], cross: null, strip: null, record: { events: [], background: [], follows: [], avoid: [] },
    jobs: [], wave: null, parentWave: null, pictures: false, hasModel: true };
  let root, el;

  // requests to the server

  const cut = () => Object.assign(
    new Error("The studio does not answer: was it ended? Versions that were finished are kept."), { isOffline: true });

  async function ask(path, options = {}) {
    const headers = { "x-studio": "1" };
    if (options.json !== undefined) {
      headers["content-type"] = "application/json";
      options.body = JSON.stringify(options.json);
    }
    let answer;
    try {
      answer = await fetch(`/studio/api${path}`, { method: options.method || "GET", headers, body: options.body,
        signal: options.signal });
    } catch {
      throw cut();
    }
    if (options.as && answer.ok) return answer[options.as]();
    let content = {};
    try { content = await answer.json(); } catch { if (answer.ok) throw cut(); /* else an error without a sentence */ }
    if (!answer.ok) throw new Error(content.sentence || `The studio refused it (${answer.status}).`);
    return content;
  }

  const here = (rest = "") => `/projects/${state.project.id}${rest}`;
  // an answer may come after another project was opened, and is not that one's
  const isOpen = (id) => state.project !== null && state.project.id === id;
  const versionPath = (id, rest) => here(`/versions/${id}${rest}`);

  function tell(sentence, ...buttons) {
    showSentence(el.status, sentence);
    el.status.append(...buttons.flatMap((button) => [" ", button]));
  }
  // `code` in a sentence stands between backticks
  function showSentence(element, sentence) {
    element.replaceChildren(...sentence.split("`").map((part, n) => (n % 2 ? make("code", {}, part) : part)));
  }
  function complain(error) {
    showSentence(el.problem, error.message || String(error));
    el.problem.hidden = false;
    el.problem.scrollIntoView({ block: "nearest" });
  }
  function guarded(work) {
    return async (...given) => {
      el.problem.hidden = true;
      try { await work(...given); } catch (error) { complain(error); }
    };
  }

  // projects

  async function refreshState() {
    const found = await ask("/state");
    showSentence(el.model, found.model);
    el.model.hidden = state.hasModel = !found.model;
    for (const button of [el.generate, el.apply]) {
      button.disabled = !state.hasModel;
      button.title = state.hasModel ? "" : "This needs a model: see above.";
    }
    showRegion();
    el.objectThink.hidden = !found.writer;
    const shown = state.project ? state.project.id : "";
    el.projects.replaceChildren(new Option(found.projects.length ? "choose one" : "none yet", ""),
      ...found.projects.map((each) => new Option(each.name, each.id)));
    el.projects.value = shown;
    return found;
  }

  // The link that the console prints: projects of other browsers, to be taken over by this one.
  async function offerRecovery() {
    const address = new URL(location.href);
    const key = address.searchParams.get("recover");
    if (!key) return;
    address.searchParams.delete("recover");
    history.replaceState(null, "", address);  // the key is not to stand in the browser's history
    const { projects } = await ask("/recover", { method: "POST", json: { key } });
    if (!projects.length) { tell("No project belongs to another browser."); return; }
    el.recoverList.replaceChildren(...projects.map((project) => {
      const label = make("label", { className: "st-check" });
      const date = new Date(1000 * project.created).toLocaleString();
      label.append(make("input", { type: "checkbox", checked: true, value: project.id }),
        ` ${project.name} · ${clock(project.duration_s)} · ${date}`);
      const item = make("li");
      item.append(label);
      return item;
    }));
    el.recover.hidden = false;
    el.recoverNot.onclick = () => { el.recover.hidden = true; };
    el.recoverTake.onclick = guarded(async () => {
      const chosen = [...el.recoverList.querySelectorAll("input:checked")].map((box) => box.value);
      if (!chosen.length) throw new Error("Choose the projects to take over.");
      await ask("/recover", { method: "POST", json: { key, projects: chosen } });
      el.recover.hidden = true;
      const found = await refreshState();
      tell(`${chosen.length} of ${found.projects.length} projects were taken over: choose one above.`);
    });
  }

  async function openFile(file) {
    tell(`Opening ${file.name} …`);
    let found;
    try {
      found = await ask(`/projects?name=${encodeURIComponent(file.name)}`, { method: "POST", body: file });
    } finally { tell(""); }
    show(found);
    await refreshState();
    if (found.thinks) await post("/think", { region: [] }, found.id);
  }

  async function openProject(id) {
    if (!id) { show(null); return; }
    const found = await ask(`/projects/${id}`);
    if (el.projects.value === id) show(found);
  }

  async function reload(id, select) {
    const found = await ask(`/projects/${id}`);
    if (!isOpen(id)) return;
    state.project = found;
    const wanted = found.versions.find((each) => each.id === select)
      || found.versions.find((each) => state.version && each.id === state.version.id) || found.versions.at(-1) || null;
    showTree();
    await selectVersion(wanted);
  }

  function show(project) {
    stopPlaying();
    Object.assign(state, { project, version: null, other: null, hearsOther: false, cursor: 0, span: null, edits: [], clicks: [],
      region: [], strip: null, wave: null, parentWave: null });
    delete el.wave.dataset.drawn;
    el.work.hidden = el.save.hidden = el.remove.hidden = !project;
    el.empty.hidden = !!project;
    sessionStorage.setItem("st-project", project ? project.id : "");  // of this tab, for when it is loaded again
    showReading();
    if (!project) return;
    el.stage.hidden = el.strip.hidden = !project.has_pictures;
    state.view = [0, Math.max(project.duration_s, 0.1)];
    for (const field of [el.background, el.avoid]) field.value = field.defaultValue;
    for (const field of [el.words, el.sound, el.caption]) field.value = "";  // they were for another project
    el.planSaid.textContent = "";
    el.kind.value = "add";
    el.problem.hidden = true;
    undoable.length = 0;
    showThought(project.thought, project.prose);
    showTree();
    showRegion();
    showSpan();
    if (project.has_pictures) {
      el.frame.hidden = true;
      el.video.hidden = false;
      el.video.src = `/studio/api${here("/source")}`;
      const strip = new Image();
      strip.onload = () => { if (isOpen(project.id)) { state.strip = strip; drawStrip(); } };
      strip.src = `/studio/api${here("/strip")}`;
    } else {
      el.video.removeAttribute("src");
    }
    state.pictures = false;  // until the film has loaded
    showClock();
    selectVersion(project.versions.at(-1) || null).catch(complain);
  }

  // versions

  async function selectVersion(version) {
    const was = state.version ? state.version.id : null;
    state.version = version;
    if (!version) { draw(); showChanges(); return; }
    if (was !== version.id) {
      el.audioA.src = `/studio/api${versionPath(version.id, "/sound.wav")}`;
      if (isPlaying && !state.hearsOther) start(Math.min(state.cursor, version.duration_s));
      const longest = length();
      if (state.view[1] > longest || was === null) state.view = [0, longest];
      else if (state.view[0] === 0) state.view = [0, longest];
    }
    setVolumes();
    showTree();
    showChanges();
    await loadWave();
  }

  const length = () => Math.max(state.project.has_pictures ? state.project.duration_s : 0.1,
    ...state.project.versions.map((each) => each.duration_s));

  const DEEPEST = 6;
  function showTree() {
    const children = (parent) => state.project.versions.filter((each) => each.parent === parent);
    const list = (parent, depth = 0) => {
      const found = children(parent);
      if (!found.length) return null;
      // each edit stands to the right of what it was made from, up to a depth at which its title still has room
      const ul = make("ul", { className: depth === 0 ? "st-tree" : depth <= DEEPEST ? "st-tree st-branch" : "st-tree st-below" });
      for (const version of found) {
        const li = make("li");
        const button = make("button", { className: "st-button st-version" },
          `${version.id} · ${version.title} · ${clock(version.duration_s)}`
          + (version.edit_count > 1 ? ` · edit ${version.edit_number} of ${version.edit_count}` : ""));
        button.dataset.version = version.id;
        button.setAttribute("aria-pressed", String(!!state.version && state.version.id === version.id));
        if (version.is_same_outside !== null) {
          const isDifferent = !version.is_same_outside;
          button.append(make("span", { className: isDifferent ? "st-same st-differs" : "st-same" },
            isDifferent ? "changed outside of the span"
              : version.checked_samples ? `unchanged elsewhere ✓ ${version.checked_samples.toLocaleString("en")} samples compared`
                : "the edit covers the whole sound"));
        }
        button.onclick = guarded(() => selectVersion(version));
        li.append(button);
        if (state.version && state.version.id === version.id) li.append(actions(version));
        const below = list(version.id, depth + 1);
        if (below) li.append(below);
        ul.append(li);
      }
      return ul;
    };
    const kept = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.version : null;
    const tree = list(null);
    el.tree.replaceChildren(tree || make("p", { className: "st-prose" },
      "There is no sound yet: generate one from the pictures and the chain of thought."));
    if (kept) el.tree.querySelector(`[data-version="${kept}"]`)?.focus();
    showCompare();
  }

  function actions(version) {
    const box = make("div", { className: "st-actions" });
    const link = (format, text) => {
      const a = make("a", { className: "st-button", href: `/studio/api${versionPath(version.id, `/export?format=${format}`)}` }, text);
      a.setAttribute("download", "");
      a.onclick = () => { lostBy(version.id, format).then((sentence) => sentence && tell(sentence)).catch(complain); };
      box.append(a);
    };
    // a link saves nothing and says nothing where pictures do not go into such a file
    const film = (format, text) => {
      const button = make("button", { className: "st-button" }, text);
      button.onclick = guarded(async () => save(`-${version.id}.${format}`, versionPath(version.id, `/export?format=${format}`),
        await lostBy(version.id, format)));
      box.append(button);
    };
    link("wav", "Export WAV");
    if (state.project.has_pictures) { film("mp4", "Export MP4"); film("mkv", "Export MKV (lossless sound)"); }
    for (const other of state.project.versions.filter((each) => each.id !== version.id)) {
      if (other.id === version.parent || state.project.versions.length <= 4) {
        const button = make("button", { className: "st-button" }, `Compare with ${other.id}`);
        button.onclick = guarded(() => compare(other));
        box.append(button);
      }
    }
    if (state.project.versions.length > 4) {
      const choice = make("select", { ariaLabel: "Compare with another version" });
      choice.append(new Option("Compare with …", ""),
        ...state.project.versions.filter((each) => each.id !== version.id).map((each) => new Option(each.title, each.id)));
      choice.onchange = guarded(() => compare(state.project.versions.find((each) => each.id === Number(choice.value))));
      box.append(choice);
    }
    const remove = make("button", { className: "st-button" }, "Delete");
    remove.onclick = guarded(async () => {
      if (!confirm(`Delete version ${version.id}, ${version.title}?`)) return;
      const { id } = state.project;
      const path = versionPath(version.id, "");
      await ask(path, { method: "DELETE" });
      if (!isOpen(id)) return;
      canUndo(`Version ${version.id} was deleted.`, async () => {
        await ask(`${path}/restore`, { method: "POST" });
        await reload(id, version.id);
      });
      state.version = null;
      await reload(id, version.parent);
    });
    box.append(remove);
    return box;
  }

  // What the opened file holds and an export does not take over, as a sentence; "" where it takes all.
  async function lostBy(version, format) {
    const { lost } = await ask(versionPath(version, `/lost?format=${format}`));
    return lost.length ? `Not kept, as .${format} does not take it: ${lost.join(", ")}.` : "";
  }

  async function save(ending, path, remark = "") {
    const name = `${state.project.name.replace(/\.[^.]*$/, "")}${ending}`;
    tell(`Writing ${name} … ${remark}`);
    try {
      const content = await ask(path, { as: "blob" });
      const a = make("a", { href: URL.createObjectURL(content), download: name });
      a.click();
      setTimeout(() => URL.revokeObjectURL(a.href), 60_000);
    } finally { tell(remark); }
  }

  function compare(other) {
    state.other = other || null;
    state.hearsOther = false;
    if (other) {
      el.audioB.src = `/studio/api${versionPath(other.id, "/sound.wav")}`;
      el.audioB.currentTime = Math.min(state.cursor, other.duration_s);
    }
    setVolumes();
    showCompare();
  }

  function showCompare() {
    if (state.other && !state.project.versions.some((each) => each.id === state.other.id)) state.other = null;
    el.compare.hidden = !state.other || !state.version;
    if (el.compare.hidden) return;
    const heard = state.hearsOther ? state.other : state.version;
    const next = state.hearsOther ? state.version : state.other;
    const turned = Math.abs(gainDifference());
    el.compareSaid.textContent = `You hear version ${heard.id}. Both play at equal loudness`
      + (turned ? `: the louder one is turned down by ${turned.toFixed(1)} dB.` : ".");
    el.switch.textContent = `Switch to ${next.id}`;
  }

  function gainDifference() {
    if (!state.other || !state.version || state.other.loudness === null || state.version.loudness === null) return 0;
    return state.version.loudness - state.other.loudness;
  }

  function setVolumes() {
    const difference = gainDifference();
    el.audioA.volume = difference > 0 ? 10 ** (-difference / 20) : 1;
    el.audioB.volume = difference < 0 ? 10 ** (difference / 20) : 1;
  }

  function switchHeard() {
    const from = audio();
    state.hearsOther = !state.hearsOther;
    const to = audio();
    to.currentTime = Math.min(from.currentTime, to.duration || from.currentTime);
    from.pause();
    if (isPlaying) to.play().catch(complain);
    showCompare();
  }

  // playing: one clock, the sound's, which the picture follows; without a sound it is the picture's

  const audio = () => (state.hearsOther && state.other ? el.audioB : el.audioA);
  const clockOf = () => (state.version ? audio() : el.video);
  const hasPicture = () => state.pictures && state.cursor < state.project.duration_s;
  const JUMP_S = 0.25;  // farther apart than this, the picture jumps; nearer, its speed is turned
  const CLOSE_S = 0.012;
  const LATENESS_SAMPLES = 9;
  const TURN_S = 0.3;  // a difference is made up in this time, or at this share of the speed:
  const MOST_TURN = 0.25;
  const MOST_COST_S = 0.03;  // of a turn
  const SETTLING_MS = 150;
  const LATEST_START_MS = 3000;
  let isPlaying = false;
  let startNumber = 0;  // of the newest start: an older one ends where it waits
  let isStarting = false;
  let frame = 0;
  let jump = { begun: 0, cost_s: 0.1 };
  let lateness = [];  // seconds of the picture behind the sound
  let turn = { until: 0, isMade: false, settled: 0 };
  let turnCost_s = MOST_COST_S / 2;

  function stopPlaying() {
    isPlaying = isStarting = false;
    startNumber++;
    for (const each of [el.audioA, el.audioB, el.video]) each.pause();
    setTurn(0, 0);
    el.play.textContent = "Play";
    if (state.project) showBox();
  }

  function play() {
    if (isPlaying) { stopPlaying(); return; }
    if (!state.version && !state.pictures) return;
    const end = state.version ? state.version.duration_s : state.project.duration_s;
    start(state.cursor >= end - 0.02 ? 0 : state.cursor);
  }

  // Move to a time; sound and picture go on together when both are there.
  async function start(time) {
    const number = ++startNumber;
    isPlaying = isStarting = true;
    state.cursor = time;
    el.play.textContent = "Pause";
    cancelAnimationFrame(frame);
    frame = requestAnimationFrame(follow);
    const both = state.version && hasPicture() ? [audio(), el.video] : [clockOf()];
    for (const each of [el.audioA, el.audioB, el.video]) each.pause();
    setTurn(0, 0);
    await Promise.all(both.map((each) => moved(each, time)));
    if (number !== startNumber) return;
    if (both.length > 1) el.video.play().catch(() => {});
    try {
      await both[0].play();
    } catch (error) {
      if (number === startNumber && error.name !== "AbortError") { stopPlaying(); complain(error); }
    }
    if (number === startNumber) isStarting = false;
  }

  // An element that has come to a time, or does not come there soon.
  function moved(element, time) {
    return new Promise((done) => {
      const go = () => {
        if (Math.abs(element.currentTime - time) < 0.001 && !element.seeking) { done(); return; }
        element.addEventListener("seeked", done, { once: true });
        element.currentTime = time;
      };
      if (element.readyState > 0) go();
      else element.addEventListener("loadedmetadata", go, { once: true });
      setTimeout(done, LATEST_START_MS);
    });
  }

  function follow() {
    if (!isPlaying) return;
    frame = requestAnimationFrame(follow);
    if (isStarting) return;
    const clock = clockOf();
    if (clock.paused) { stopPlaying(); return; }  // it has ended, or a key of the keyboard paused it
    state.cursor = clock.currentTime;
    if (clock !== el.video) keepPicture(clock);
    if (state.cursor > state.view[1]) {
      const wide = state.view[1] - state.view[0];
      setView(state.cursor, state.cursor + wide);
    }
    showClock();
    draw();
    drawOverlay();
    if (!el.boxes.contains(document.activeElement)) showBox();
  }

  function keepPicture(sound) {
    const video = el.video;
    if (!hasPicture()) { if (!video.paused) video.pause(); return; }
    if (video.seeking || video.readyState < 3) return;
    if (jump.begun) jump = { begun: 0, cost_s: Math.min(1, (performance.now() - jump.begun) / 1000) };
    if (video.paused) video.play().catch(() => {});
    const now = performance.now();
    if (turn.until) {
      if (now < turn.until) return;
      setTurn(0, 0);
      turn = { until: 0, isMade: true, settled: now + SETTLING_MS };
    }
    if (now < turn.settled) return;
    lateness.push(sound.currentTime - video.currentTime);
    if (lateness.length < LATENESS_SAMPLES) return;
    // clocks of a browser jump for a moment on a busy machine: their median tells where the picture is
    const late_s = lateness.splice(0).sort((a, b) => a - b)[LATENESS_SAMPLES >> 1];
    if (turn.isMade) turnCost_s = Math.max(0, Math.min(MOST_COST_S, turnCost_s + late_s / 3));
    turn.isMade = false;
    if (Math.abs(late_s) > JUMP_S) {
      jump.begun = now;
      video.currentTime = sound.currentTime + jump.cost_s;  // where the sound will be by then
    } else if (Math.abs(late_s) > CLOSE_S) {
      // a change of the speed and back costs a film with sound about 25 ms: it is made once, and the cost made up, too
      const ahead_s = late_s + turnCost_s;
      const by = Math.sign(ahead_s) * Math.min(MOST_TURN, Math.abs(ahead_s) / TURN_S);
      setTurn(by, now + 1000 * ahead_s / by);
    }
  }

  function setTurn(by, until) {
    turn = { until, isMade: false, settled: 0 };
    lateness = [];
    el.video.playbackRate = 1 + by;
  }

  let frameTimer = 0;
  function seek(time) {
    state.cursor = Math.min(Math.max(0, time), length());
    if (isPlaying) start(state.cursor);
    else for (const each of [el.audioA, el.audioB]) if (each.src) each.currentTime = state.cursor;
    if (state.project.has_pictures) {
      const at = Math.min(state.cursor, Math.max(0, state.project.duration_s - 0.01));
      if (state.pictures && !(isPlaying && hasPicture())) el.video.currentTime = at;
      else if (!state.pictures) {
        clearTimeout(frameTimer);
        frameTimer = setTimeout(() => { el.frame.src = `/studio/api${here(`/frame?at=${at.toFixed(3)}`)}`; }, 120);
      }
    }
    showClock();
    draw();
    drawOverlay();
    showBox();
  }

  // A time as people write it: "4.20 s", "1:04.20", "1:00:00.00"; and as fields take it, in which a bare number is
  // one of seconds.
  function clock(time, decimals = 2) {
    return time < 60 ? `${time.toFixed(decimals)} s` : timeText(time, decimals);
  }
  function timeText(time, decimals = 2) {
    const unit = 10 ** decimals;
    const parts = Math.round(time * unit);
    const seconds = ((parts % (60 * unit)) / unit).toFixed(decimals);
    const minutes = Math.floor(parts / (60 * unit));
    if (!minutes) return seconds;
    const late = seconds.padStart(decimals ? 3 + decimals : 2, "0");
    return minutes < 60 ? `${minutes}:${late}` : `${Math.floor(minutes / 60)}:${String(minutes % 60).padStart(2, "0")}:${late}`;
  }
  function timeOf(field) {
    const text = field.value.trim().replace(",", ".");
    if (text === "") return null;
    if (!/^(\d+:){0,2}(\d+\.?\d*|\.\d+)$/.test(text)) {
      throw new Error(`"${field.value}" is no time: give seconds, or minutes and seconds as 1:04.5.`);
    }
    return text.split(":").reduce((sum, part) => 60 * sum + Number(part), 0);
  }

  function showClock() {
    el.clock.textContent = length() < 60 ? `${state.cursor.toFixed(2)} of ${length().toFixed(2)} s`
      : `${timeText(state.cursor)} of ${timeText(length())}`;
    el.wave.setAttribute("aria-valuemax", length().toFixed(2));
    el.wave.setAttribute("aria-valuenow", state.cursor.toFixed(2));
    el.wave.setAttribute("aria-valuetext", length() < 60 ? `${state.cursor.toFixed(2)} seconds` : timeText(state.cursor));
  }

  // the time line

  let waveNumber = 0;
  async function loadWave() {
    if (!state.version) return;
    const number = ++waveNumber;
    const width = Math.max(100, Math.round(el.wave.clientWidth));
    const [start, end] = state.view;
    const part = async (id) => new Int16Array(await ask(
      versionPath(id, `/waveform?start=${start}&end=${end}&width=${width}`), { as: "arrayBuffer" }));
    const parent = state.version.parent;
    const [wave, before] = await Promise.all([part(state.version.id), parent ? part(parent) : null]);
    if (number !== waveNumber) return;
    state.wave = wave;
    state.parentWave = before;
    draw();
    el.wave.dataset.drawn = "yes";
  }

  let waveTimer = 0;
  function setView(start, end) {
    const longest = length();
    const wide = Math.min(Math.max(end - start, 0.02), longest);
    start = Math.min(Math.max(0, start), longest - wide);
    state.view = [start, start + wide];
    draw();
    drawStrip();
    clearTimeout(waveTimer);
    waveTimer = setTimeout(() => loadWave().catch(complain), 60);
  }

  function zoom(by, around = state.cursor) {
    const [start, end] = state.view;
    const centre = Math.min(Math.max(around, start), end);
    setView(centre - (centre - start) * by, centre + (end - centre) * by);
  }

  const toX = (time) => ((time - state.view[0]) / (state.view[1] - state.view[0])) * el.wave.clientWidth;
  const toTime = (x) => state.view[0] + (x / el.wave.clientWidth) * (state.view[1] - state.view[0]);

  function sized(canvas, height) {
    const ratio = window.devicePixelRatio || 1;
    const width = canvas.clientWidth;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.height = `${height}px`;
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    return [pen, width];
  }

  const HEIGHT = 140;
  const NAME_ROWS = 4;
  const NAME_HEIGHT = 15;
  function draw() {
    if (!state.project || el.work.hidden) return;
    const [pen, width] = sized(el.wave, HEIGHT);
    if (!width) return;
    const style = getComputedStyle(root);
    const colour = (name) => style.getPropertyValue(name).trim();
    const middle = (HEIGHT - 18) / 2;
    const ground = colour("--background-fill-secondary") || "#fafafa";
    pen.fillStyle = ground;
    pen.fillRect(0, 0, width, HEIGHT - 18);
    if (state.version) {
      pen.fillStyle = "rgba(217, 119, 6, .16)";
      for (const [from, to] of state.version.changed) {
        pen.fillRect(toX(from), 0, Math.max(1, toX(to) - toX(from)), HEIGHT - 18);
      }
    }
    if (state.span) {
      pen.fillStyle = "rgba(8, 145, 178, .22)";
      pen.fillRect(toX(state.span[0]), 0, Math.max(2, toX(state.span[1]) - toX(state.span[0])), HEIGHT - 18);
    }
    for (const edit of state.edits) {
      pen.fillStyle = "rgba(124, 58, 237, .2)";
      pen.fillRect(toX(edit.start_s), 0, Math.max(2, toX(edit.end_s) - toX(edit.start_s)), HEIGHT - 18);
    }
    const columns = (values, fill, within) => {
      pen.fillStyle = fill;
      const step = width / (values.length / 2);
      for (let n = 0; n < values.length / 2; n++) {
        const x = n * step;
        if (within && !within(toTime(x))) continue;
        const high = (values[2 * n + 1] / 32767) * middle;
        const low = (values[2 * n] / 32767) * middle;
        pen.fillRect(x, middle - high, Math.max(1, step), Math.max(1, high - low));
      }
    };
    const inChange = (time) => state.version.changed.some(([from, to]) => time >= from && time <= to);
    if (state.wave && state.version) {
      columns(state.wave, colour("--st-accent"));
      if (state.version.changed.length) columns(state.wave, colour("--st-changed"), inChange);
      if (state.parentWave) {
        pen.globalAlpha = 0.6;
        columns(state.parentWave, "#71717a", inChange);
        pen.globalAlpha = 1;
      }
    }
    pen.font = "11px system-ui, sans-serif";
    const wide = state.view[1] - state.view[0];
    const rough = wide / Math.max(2, width / 90);
    const step = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1200].find((each) => each >= rough) || 1800;
    const longest = length();
    for (let tick = Math.ceil(state.view[0] / step) * step; tick < state.view[1]; tick += step) {
      pen.fillStyle = colour("--st-line") || "#d4d4d8";
      pen.fillRect(toX(tick), 0, 1, HEIGHT - 14);
      pen.fillStyle = colour("--st-quiet");
      const text = longest < 60 ? `${Number(tick.toFixed(2))} s` : timeText(tick, step < 1 ? 2 : 0);
      if (toX(tick) + 3 + pen.measureText(text).width <= width) pen.fillText(text, toX(tick) + 3, HEIGHT - 4);
    }
    const ends = [];  // of the last name in each row: names stand below each other where they would overlap
    for (const event of state.record.events) {
      if (event.start_s > state.view[1] || event.end_s < state.view[0]) continue;
      pen.fillStyle = colour("--st-text");
      pen.fillRect(toX(event.start_s), 0, Math.max(2, toX(event.end_s) - toX(event.start_s)), 2);
      const wide = pen.measureText(event.sound).width + 6;
      const left = Math.max(0, Math.min(toX(event.start_s), width - wide));
      const free = ends.findIndex((end) => end <= left);
      const row = free === -1 ? ends.length : free;
      if (row >= NAME_ROWS) continue;
      ends[row] = left + wide;
      pen.globalAlpha = 0.85;
      pen.fillStyle = ground;
      pen.fillRect(left, 3 + NAME_HEIGHT * row, wide, NAME_HEIGHT);
      pen.globalAlpha = 1;
      pen.fillStyle = colour("--st-text");
      pen.fillText(event.sound, left + 3, 14 + NAME_HEIGHT * row);
    }
    for (const edit of state.edits) {  // what the words were understood as, before it is applied
      const left = toX(edit.start_s);
      pen.setLineDash([5, 3]);
      pen.strokeStyle = colour("--st-planned");
      pen.lineWidth = 2;
      pen.strokeRect(left + 1, 1, Math.max(2, toX(edit.end_s) - left - 2), HEIGHT - 20);
      pen.setLineDash([]);
      const text = planned(edit);
      const wide = pen.measureText(text).width + 6;
      const from = Math.max(0, Math.min(left + 3, width - wide));
      pen.fillStyle = ground;
      pen.fillRect(from, HEIGHT - 37, wide, NAME_HEIGHT);
      pen.fillStyle = colour("--st-planned");
      pen.fillText(text, from + 3, HEIGHT - 26);
    }
    pen.fillStyle = "#b91c1c";
    pen.fillRect(toX(state.cursor), 0, 2, HEIGHT - 14);
  }

  function drawStrip() {
    if (!state.strip || !state.project) return;
    const [pen, width] = sized(el.strip, 48);
    const count = 16;
    const piece = state.strip.width / count;
    const shownWidth = piece * 48 / state.strip.height;
    for (let x = 0; x < width; x += shownWidth) {
      const time = toTime(x + shownWidth / 2);
      if (time > state.project.shown_s) break;
      const number = Math.min(count - 1, Math.floor((time / state.project.shown_s) * count));
      pen.drawImage(state.strip, number * piece, 0, piece, state.strip.height, x, 0, shownWidth, 48);
    }
  }

  function showSpan() {
    el.from.value = state.span ? timeText(state.span[0]) : "";
    el.to.value = state.span ? timeText(state.span[1]) : "";
    draw();
  }

  function setSpan(from, to) {
    const [a, b] = from <= to ? [from, to] : [to, from];
    state.span = b - a < 0.005 ? null : [Math.max(0, a), b];
    if (state.span) changeReading({ start_s: state.span[0], end_s: state.span[1] });
    showSpan();
  }

  const spanFromFields = guarded(() => {
    const [from, to] = [timeOf(el.from), timeOf(el.to)];
    state.span = from !== null && to !== null && to > from ? [from, to] : null;
    if (state.span) changeReading({ start_s: from, end_s: to });
    draw();
  });

  const between = ([from, to]) => (to < 60 ? `${from.toFixed(2)} to ${to.toFixed(2)} s` : `${timeText(from)} to ${timeText(to)}`);
  function showChanges() {
    const version = state.version;
    if (!version || version.parent === null || version.span === null) {
      el.changes.textContent = "";
      return;
    }
    const spans = version.changed.slice(0, 4).map(between).join(", ");
    el.changes.textContent = (version.changed.length ? `Changed against version ${version.parent}: ${spans}`
      + (version.changed.length > 4 ? ", and more" : "") + " (orange; grey: before). " : `Nothing differs from version ${version.parent}. `)
      + (!version.is_same_outside ? "Samples outside of the span differ."
        : version.checked_samples ? `Unchanged elsewhere: ${version.checked_samples.toLocaleString("en")} samples outside of `
          + `${between(version.span)} were compared, and are the same numbers.`
          : "The edit covers the whole sound: there is nothing outside of it to compare.");
  }

  // Ctrl and + is the browser's zoom, Alt and an arrow its way back; AltGr is how some keyboards write [
  const isBrowsers = (event) => (event.ctrlKey || event.metaKey || event.altKey) && !event.getModifierState("AltGraph");

  function bindWave() {
    let begun = null;
    const at = (event) => toTime(event.clientX - el.wave.getBoundingClientRect().left);
    el.wave.addEventListener("pointerdown", (event) => {
      begun = at(event);
      el.wave.setPointerCapture(event.pointerId);
    });
    el.wave.addEventListener("pointermove", (event) => {
      if (begun !== null && Math.abs(toX(at(event)) - toX(begun)) > 4) setSpan(begun, Math.min(at(event), length()));
    });
    el.wave.addEventListener("pointerup", (event) => {
      if (begun !== null && Math.abs(toX(at(event)) - toX(begun)) <= 4) seek(at(event));
      begun = null;
    });
    el.wave.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.shiftKey) return;
      event.preventDefault();
      if (event.ctrlKey) zoom(event.deltaY > 0 ? 1.25 : 0.8, at(event));
      else {
        const by = (event.deltaY || event.deltaX) / 500 * (state.view[1] - state.view[0]);
        setView(state.view[0] + by, state.view[1] + by);
      }
    }, { passive: false });
    el.wave.addEventListener("keydown", (event) => {
      if (isBrowsers(event)) return;
      const step = event.shiftKey ? 1 : 0.1;
      const work = {
        ArrowLeft: () => seek(state.cursor - step), ArrowRight: () => seek(state.cursor + step),
        Home: () => seek(0), End: () => seek(length()), " ": play, Escape: () => { state.span = null; showSpan(); },
        "[": () => setSpan(state.cursor, state.span && state.span[1] > state.cursor ? state.span[1] : length()),
        "]": () => setSpan(state.span && state.span[0] < state.cursor ? state.span[0] : 0, state.cursor),
        "+": () => zoom(0.6), "-": () => zoom(1.7),
      }[event.key];
      if (work) { event.preventDefault(); work(); }
    });
  }

  // the object in the picture

  const shownPicture = () => (el.frame.hidden ? el.video : el.frame);

  function placeOverlay() {
    if (!state.project || !state.project.has_pictures) return;
    const picture = shownPicture();
    const outer = picture.parentElement.getBoundingClientRect();
    const box = picture.getBoundingClientRect();
    const ratio = state.project.width / state.project.height;
    let width = box.width;
    let height = box.width / ratio;
    if (height > box.height) { height = box.height; width = height * ratio; }
    Object.assign(el.overlay.style, { width: `${width}px`, height: `${height}px`,
      left: `${box.left - outer.left + (box.width - width) / 2}px`, top: `${box.top - outer.top + (box.height - height) / 2}px` });
    drawOverlay();
  }

  function boxAt(time) {
    const region = state.region;
    if (!region.length) return null;
    let n = region.findIndex((each) => each.at_s >= time);
    if (n === -1) return region.at(-1);
    if (n === 0) return region[0];
    const [a, b] = [region[n - 1], region[n]];
    const share = (time - a.at_s) / (b.at_s - a.at_s);
    const mixed = {};
    for (const key of ["x", "y", "width", "height"]) mixed[key] = a[key] + share * (b[key] - a[key]);
    return mixed;
  }

  function drawOverlay(dragged = null) {
    if (!state.project || !state.project.has_pictures) return;
    const height = el.overlay.clientHeight;
    const [pen, width] = sized(el.overlay, height);
    const scale = width / state.project.width;
    const box = dragged || boxAt(state.cursor);
    if (box) {
      pen.lineWidth = 4;
      pen.strokeStyle = "#000";
      pen.strokeRect(box.x * scale, box.y * scale, box.width * scale, box.height * scale);
      pen.lineWidth = 2;
      pen.strokeStyle = "#facc15";
      pen.strokeRect(box.x * scale, box.y * scale, box.width * scale, box.height * scale);
    }
    if (state.cross && document.activeElement === el.overlay) {
      const [x, y] = [state.cross[0] * scale, state.cross[1] * scale];
      for (const [wide, ink] of [[4, "#000"], [2, "#fff"]]) {
        pen.lineWidth = wide;
        pen.strokeStyle = ink;
        pen.beginPath();
        pen.moveTo(x - 10, y); pen.lineTo(x + 10, y); pen.moveTo(x, y - 10); pen.lineTo(x, y + 10);
        pen.stroke();
      }
    }
  }

  const followObject = guarded(async (click) => {
    const at = Math.min(state.cursor, state.project.duration_s);
    const clicks = [...state.clicks.filter((each) => Math.abs(each.at_s - at) > 0.06), { at_s: at, ...click }];
    const { id } = state.project;
    tell("Following the object …");
    try {
      const found = await ask(here("/region"), { method: "POST", json: { clicks } });
      if (!isOpen(id)) return;
      state.clicks = clicks;
      state.region = found.region;
    } finally { tell(""); }
    showRegion();
  });

  function showRegion() {
    const region = state.region;
    el.objectState.textContent = region.length
      ? `Followed from ${region[0].at_s.toFixed(1)} to ${clock(region.at(-1).at_s, 1)} by ${state.clicks.length} `
        + `${state.clicks.length === 1 ? "click" : "clicks"}. Go to another time and click again where the box is wrong.`
      : "Click an object in the picture to follow it; drag a box where a click is not enough. Clicks at other times correct its way.";
    el.objectThink.disabled = el.objectClear.disabled = el.only.disabled = !region.length;
    el.objectAdd.disabled = !region.length || !state.hasModel;
    if (!region.length) el.only.checked = false;
    showBox();
    drawOverlay();
  }

  const boxFields = () => [[el.boxX, "x"], [el.boxY, "y"], [el.boxW, "width"], [el.boxH, "height"]];
  // The box of the time that is shown: it is this one that is corrected.
  function showBox() {
    const box = boxAt(state.cursor);
    for (const [field, key] of boxFields()) field.value = box ? Math.round(box[key]) : "";
  }
  const correctBox = guarded(async () => {
    const box = Object.fromEntries(boxFields().map(([field, key]) => [key, field.value === "" ? NaN : Number(field.value)]));
    if (!Object.values(box).every(Number.isFinite)) {
      throw new Error("Give x, y, width and height of the box at the time that is shown, or drag it in the picture.");
    }
    await followObject(box);
  });

  function bindOverlay() {
    let begun = null;
    const at = (event) => {
      const box = el.overlay.getBoundingClientRect();
      const scale = state.project.width / box.width;
      return [(event.clientX - box.left) * scale, (event.clientY - box.top) * scale];
    };
    const boxOf = (a, b) => ({ x: Math.max(0, Math.min(a[0], b[0])), y: Math.max(0, Math.min(a[1], b[1])),
      width: Math.abs(a[0] - b[0]), height: Math.abs(a[1] - b[1]) });
    el.overlay.addEventListener("pointerdown", (event) => {
      begun = at(event);
      el.overlay.setPointerCapture(event.pointerId);
    });
    el.overlay.addEventListener("pointermove", (event) => { if (begun) drawOverlay(boxOf(begun, at(event))); });
    el.overlay.addEventListener("pointerup", (event) => {
      if (!begun) return;
      state.cross = at(event);
      const box = boxOf(begun, at(event));
      const small = 6 * state.project.width / el.overlay.clientWidth;
      if (box.width < small && box.height < small) followObject({ x: Math.max(0, begun[0]), y: Math.max(0, begun[1]) });
      else followObject(box);
      begun = null;
    });
    el.overlay.addEventListener("focus", () => {
      state.cross = state.cross || [state.project.width / 2, state.project.height / 2];
      drawOverlay();
    });
    el.overlay.addEventListener("blur", () => drawOverlay());
    el.overlay.addEventListener("keydown", (event) => {
      if (isBrowsers(event)) return;
      const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
      if (moves && state.cross) {
        event.preventDefault();
        const by = event.shiftKey ? 0.002 : 0.02;
        state.cross = [Math.min(Math.max(0, state.cross[0] + moves[0] * by * state.project.width), state.project.width - 1),
          Math.min(Math.max(0, state.cross[1] + moves[1] * by * state.project.width), state.project.height - 1)];
        drawOverlay();
      } else if (event.key === "Enter" && state.cross) {
        event.preventDefault();
        followObject({ x: state.cross[0], y: state.cross[1] });
      }
    });
  }

  // the chain of thought

  const knownThoughts = new Map();  // of each project, as the server has it: another tab may change it
  function showThought(record, prose) {
    knownThoughts.set(state.project.id, structuredClone(record));
    state.record = { background: [], follows: [], avoid: [], events: [], ...record };
    for (const [field, words] of [[el.background, state.record.background], [el.avoid, state.record.avoid]]) {
      const isTyped = field.value !== field.defaultValue;  // by a person who has not left the field yet
      field.defaultValue = words.join(", ");
      if (!isTyped) field.value = field.defaultValue;
    }
    el.prose.textContent = prose;
    saved = saved.catch(() => {});  // what was refused is no longer in the table
    showEvents();
  }

  const eventOfRow = new WeakMap();
  function showEvents() {
    const focused = el.events.contains(document.activeElement) ? document.activeElement : null;
    const controls = (row) => [...row.querySelectorAll("input, button")];
    const before = focused && focused.closest("tr");
    const place = focused && [eventOfRow.get(before), controls(before).indexOf(focused)];
    el.events.replaceChildren(...state.record.events.map((event, number) => {
      const row = make("tr");
      eventOfRow.set(row, event);
      const field = (type, value, label, change) => {
        const input = make("input", { type, value, ariaLabel: `${label} ${number + 1}` });
        if (type === "number") { input.step = "0.01"; input.min = "0"; }
        input.onchange = () => { undoThought(""); change(input.value); keepThought(); };
        const cell = make("td");
        cell.append(input);
        row.append(cell);
      };
      field("text", event.sound, "Sound", (value) => { event.sound = value; });
      field("number", event.start_s, "Beginning of sound", (value) => { event.start_s = Number(value); });
      field("number", event.end_s, "End of sound", (value) => { event.end_s = Number(value); });
      const cell = make("td");
      const remove = make("button", { className: "st-button", ariaLabel: `Remove sound ${number + 1}` }, "×");
      remove.onclick = () => {
        const number = state.record.events.indexOf(event);
        undoThought(`${event.sound} was removed.`);
        state.record.follows = state.record.follows.filter((link) => link.event !== number && link.after !== number)
          .map((link) => ({ ...link, event: link.event - (link.event > number), after: link.after - (link.after > number) }));
        state.record.events.splice(number, 1);
        showEvents();
        keepThought();
        el.eventAdd.focus();
      };
      cell.append(remove);
      row.append(cell);
      return row;
    }));
    markWrongRows();
    if (focused) {
      const after = [...el.events.children].find((row) => eventOfRow.get(row) === place[0]);
      if (after) controls(after)[place[1]].focus();
    }
    draw();
  }

  const phrases = (text) => text.split(",").map((each) => each.trim()).filter(Boolean);

  // What is wrong with a row of the table; "" where nothing is. Such a row is left out until it is changed.
  const LATE_S = 0.05;
  function rowProblem(event) {
    const name = event.sound.trim();
    if (!name) return "has no name";
    if (!(event.end_s > event.start_s)) return `(${name}) must end after its beginning, ${event.start_s} s`;
    if (event.end_s > state.project.duration_s + LATE_S) {
      return `(${name}) ends at ${clock(event.end_s)}, and the clip at ${clock(state.project.duration_s)}`;
    }
    return "";
  }
  const wrongRows = () => state.record.events.flatMap((event, number) => {
    const problem = rowProblem(event);
    return problem ? [`Row ${number + 1} ${problem}`] : [];
  });
  function markWrongRows() {
    for (const row of el.events.children) {
      for (const input of row.querySelectorAll("input")) {
        input.setAttribute("aria-invalid", String(!!rowProblem(eventOfRow.get(row))));
      }
    }
    const wrong = wrongRows();
    el.rowsSaid.hidden = !wrong.length;
    el.rowsSaid.textContent = wrong.length ? `${wrong.join(". ")}. Change it, or remove it: until then it counts for nothing.` : "";
  }
  // The record without its wrong rows, and without links from and to them.
  function usedRecord() {
    const rows = state.record.events.map((event, number) => (rowProblem(event) ? -1 : number)).filter((number) => number >= 0);
    const places = new Map(rows.map((number, place) => [number, place]));
    const follows = state.record.follows.filter((link) => places.has(link.event) && places.has(link.after))
      .map((link) => ({ ...link, event: places.get(link.event), after: places.get(link.after) }));
    return structuredClone({ ...state.record, events: rows.map((number) => state.record.events[number]), follows });
  }

  // saves follow each other, and requests that read the chain of thought follow them
  let saved = Promise.resolve();
  function keepThought() {
    const order = state.record.events.map((event, number) => [event, number]).sort((a, b) => a[0].start_s - b[0].start_s);
    const places = new Map(order.map(([, number], place) => [number, place]));
    state.record.follows = state.record.follows.map((link) => ({ ...link, event: places.get(link.event), after: places.get(link.after) }))
      .filter((link) => link.after < link.event);
    const moved = order.some(([, number], place) => number !== place);
    state.record.events = order.map(([event]) => event);
    state.record.background = phrases(el.background.value);
    state.record.avoid = phrases(el.avoid.value);
    for (const field of [el.background, el.avoid]) field.defaultValue = field.value;
    if (moved) setTimeout(showEvents);  // when the next field has the focus, which then stays in it
    else { markWrongRows(); draw(); }
    const [path, { id }, record] = [here("/thought"), state.project, usedRecord()];
    saved = saved.catch(() => {}).then(async () => {
      const kept = await ask(path, { method: "PUT", json: { record, known: knownThoughts.get(id) } });
      knownThoughts.set(id, kept.record);
      if (isOpen(id)) el.prose.textContent = kept.prose;
    });
    const saving = saved;
    guarded(() => saving)();
  }

  // taking back, the newest first: by the button beside the message, or by Ctrl and Z
  const undoable = [];
  const MOST_UNDOABLE = 50;
  function canUndo(sentence, undo) {
    const entry = guarded(async () => {
      undoable.splice(undoable.indexOf(entry), 1);
      tell("");
      await undo();
    });
    undoable.push(entry);
    undoable.splice(0, undoable.length - MOST_UNDOABLE);
    if (!sentence) return;
    const button = make("button", { className: "st-button" }, "Undo");
    button.onclick = entry;
    tell(sentence, button);
  }
  function undoThought(sentence) {
    const before = structuredClone(state.record);
    const { id } = state.project;
    canUndo(sentence, async () => {
      if (!isOpen(id)) return;
      state.record = before;
      el.background.value = before.background.join(", ");
      el.avoid.value = before.avoid.join(", ");
      showEvents();
      keepThought();
    });
  }

  // requests to the models

  const isActive = (job) => job.state === "waiting" || job.state === "running";
  const post = async (path, body, id = state.project.id) => {
    const job = await ask(`/projects/${id}${path}`, { method: "POST", json: { page, ...body } });
    remember(job, { path, body });
    takeJobs([...state.jobs.filter(isActive), job]);
    poll();
  };
  const sampler = () => ({ seed: Number(el.seed.value) || 0, steps: Number(el.steps.value) || 24 });

  const generate = guarded(async () => {
    const { id } = state.project;
    const asked = { caption: el.caption.value, region: el.only.checked ? state.region : [], ...sampler() };
    const wrong = wrongRows();
    if (wrong.length) throw new Error(`${wrong.join(". ")}. Change it, or remove it from the table.`);
    await saved;
    await post("/generate", asked, id);
  });

  const think = guarded(async (region) => {
    const { id } = state.project;
    await saved.catch(() => {});
    await post("/think", { region }, id);
  });

  const apply = guarded(async (kind, caption, withRegion) => {
    if (!state.version) throw new Error("There is no sound to edit yet: generate one first.");
    const [from, to] = [timeOf(el.from), timeOf(el.to)];
    if (kind !== "extend" && from === null && to === null && !(withRegion && state.region.length)) {
      throw new Error("Nothing says where: select seconds on the waveform, click an object, or say it in words and read them.");
    }
    await post("/edit", { version: state.version.id, kind, caption, start_s: kind === "extend" ? null : from, end_s: to,
      region: withRegion ? state.region : [], ...sampler() });
  });

  const plan = guarded(async () => {
    if (!state.version) throw new Error("There is no sound to edit yet: generate one first.");
    const { id } = state.project;
    const span = state.span ? { start_s: state.span[0], end_s: state.span[1] } : {};
    const asked = { page, version: state.version.id, instruction: el.words.value, has_object: state.region.length > 0, ...span };
    forgetReading();
    await saved.catch(() => {});  // words are read with the chain of thought as it was kept last
    const found = await ask(`/projects/${id}/plan`, { method: "POST", json: asked });
    if (found.job) { remember(found.job, { path: "/plan", body: asked }); takeJobs([...state.jobs, found.job]); }
    else if (isOpen(id)) takeReading(found);
  });

  const planned = (edit) => `${edit.kind === "inpaint" ? "fill" : edit.kind} `
    + (edit.caption || ({ mute: "", inpaint: "with what fits", extend: "with what fits" }[edit.kind] ?? "the object"));

  const editInWords = (edit) => `${planned(edit).trim()} from ${between([edit.start_s, edit.end_s])}`;

  function takeReading(found) {
    state.edits = found.edits || [];
    if (state.edits.length) {
      el.kind.value = state.edits[0].kind;
      el.sound.value = state.edits[0].caption;
    }
    showReading(found);
    if (state.edits.length) el.apply.focus();
  }

  function forgetReading() {
    if (!state.edits.length && !el.planSaid.textContent) return;
    state.edits = [];
    showReading();
  }

  // an edit that was read alone is changed by the fields and the selection; several are not what the fields say
  function changeReading(changes) {
    if (state.edits.length !== 1) { forgetReading(); return; }
    Object.assign(state.edits[0], changes);
    showReading();
  }

  function showReading(found = {}) {
    const lines = state.edits.map(editInWords);
    el.planSaid.textContent = found.question || (lines.length
      ? `Understood: ${lines.join("; ")}. It is drawn on the time line: apply it, or change it first.` : "");
    el.choices.hidden = !(found.choices || []).length;
    el.choices.replaceChildren(...(found.choices || []).map((words) => {
      const button = make("button", { className: "st-button" }, words);
      button.onclick = () => { el.words.value = words; plan(); };
      return button;
    }));
    draw();
  }

  const applyReading = guarded(async () => {
    await post("/edits", { version: state.version.id, edits: state.edits, region: state.region, ...sampler() });
    forgetReading();
  });

  // a job's line is one element from its beginning to its end: a button that is exchanged with every step cannot be
  // pressed, and loses the focus
  const jobLines = new Map();
  function jobLine(job) {
    const line = { item: make("li"), said: make("span"), bar: make("progress", { ariaLabel: job.title }) };
    const stop = make("button", { className: "st-button" }, "Stop");
    stop.onclick = guarded(() => ask(`/jobs/${job.number}/stop?page=${page}`, { method: "POST" }));
    line.item.append(line.said, stop, line.bar);
    el.jobs.append(line.item);
    jobLines.set(job.key, line);
    return line;
  }

  // Requests of this window whose end it has not told yet, by their keys; they outlast a page that is loaded again.
  const pending = new Map();
  function remember(job, order) {
    const entry = { since: performance.now(), title: job.title, project: job.project, ...pending.get(job.key), ...order };
    pending.set(job.key, entry);
    storePending();
  }
  function forget(key) {
    pending.delete(key);
    storePending();
  }
  function storePending() {
    try {
      sessionStorage.setItem("st-pending", JSON.stringify([...pending]));
    } catch { /* the store is full: after a reload this window knows its requests from the server alone */ }
  }
  function recallPending() {
    for (const [key, entry] of JSON.parse(sessionStorage.getItem("st-pending") || "[]")) pending.set(key, { ...entry, since: 0, isSettled: false });
  }

  function takeJobs(jobs) {
    state.jobs = jobs;
    const shown = jobs.filter(isActive);
    for (const [key, line] of jobLines) {
      if (!shown.some((job) => job.key === key)) { line.item.remove(); jobLines.delete(key); }
    }
    for (const job of shown) {
      if (!pending.has(job.key)) remember(job, {});
      const { said, bar } = jobLines.get(job.key) || jobLine(job);
      said.textContent = job.state === "waiting" ? `${job.title}: ${job.place} before it`
        : job.step ? `${job.title}: step ${job.step} of ${job.steps}` : `${job.title} …`;
      bar.hidden = job.state === "waiting";
      if (job.steps) { bar.max = job.steps; bar.value = job.step; }
    }
    for (const job of jobs) {
      const entry = pending.get(job.key);
      if (isActive(job) || !entry) continue;
      forget(job.key);
      finished({ ...entry, ...job }).catch(complain);
    }
  }

  // A server that was started anew does not know a request: it was finished before, was cut off between two of its edits,
  // or is lost.
  async function settle(key, entry) {
    entry.isSettled = true;
    const found = await ask(`/projects/${entry.project}`).catch((error) => (error.isOffline ? "cut" : null));
    if (found === "cut") { entry.isSettled = false; return; }
    if (!found) { forget(key); complain(new Error(`Lost: ${entry.title}. Its project is not there any more.`)); return; }
    const last = editsOf(found, key).at(-1);
    if (last && last.edit_number === last.edit_count) {
      forget(key);
      await finished({ ...entry, key, state: "done", result: { version: last.id } });
    } else {
      await tellUnfinished(key, entry, found, "The studio ended");
    }
  }

  const editsOf = (project, key) => project.versions.filter((version) => version.request === key)
    .sort((a, b) => a.edit_number - b.edit_number);

  // What a request has done that did not come to its end, and what remains, until the line is dismissed.
  async function tellUnfinished(key, entry, project, cause) {
    const applied = editsOf(project, key);
    const last = applied.at(-1);
    const [path, body] = [entry.path, entry.body];
    const item = make("li", { className: "st-lost" });
    const button = (text, work) => {
      const made = make("button", { className: "st-button" }, text);
      made.onclick = guarded(async () => { item.remove(); forget(key); await work(); });
      item.append(made);
    };
    if (last) {
      const remaining = body && body.edits ? body.edits.slice(last.edit_number) : [];
      const count = last.edit_count - last.edit_number;
      item.append(make("span", {}, `Cut off: ${entry.title}. ${cause} after ${last.edit_number} of ${last.edit_count} edits. Applied: `
        + `${applied.map((version) => `version ${version.id}, ${version.title}`).join("; ")}. Not applied: `
        + `${remaining.map(editInWords).join("; ") || (count === 1 ? "the last edit" : `the last ${count} edits`)}.`));
      if (remaining.length) button("Apply the rest", () => post(path, { ...body, version: last.id, edits: remaining }, project.id));
    } else {
      item.append(make("span", {}, `Lost: ${entry.title}. ${cause} before it was done; nothing was changed.`));
      if (path === "/plan") button("Start it again", async () => { el.words.value = body.instruction; await plan(); });
      else if (path) button("Start it again", () => post(path, body, project.id));
    }
    button("Dismiss", async () => {});
    el.jobs.append(item);
    if (last && isOpen(project.id)) await reload(project.id, last.id);
  }

  // the connection: the page asks for its requests again and again, and says when it gets no answer
  const [ACTIVE_MS, QUIET_MS, TIMEOUT_MS] = [250, 1000, 1800];
  let pollTimer = 0;
  let pollNumber = 0;
  let run = null;
  async function poll() {
    clearTimeout(pollTimer);
    const number = ++pollNumber;
    const begun = performance.now();
    try {
      const found = await ask(`/jobs?page=${page}`, { signal: AbortSignal.timeout(TIMEOUT_MS) });
      if (number !== pollNumber) return;
      connected(found, begun);
    } catch (error) {
      if (number !== pollNumber) return;
      cutOff(error);
    }
    pollTimer = setTimeout(poll, state.jobs.some(isActive) && el.offline.hidden ? ACTIVE_MS : QUIET_MS);
  }

  function connected(found, begun) {
    const wasCutOff = !el.offline.hidden;
    el.offline.hidden = true;
    root.classList.remove("st-cut-off");
    const isNew = run !== null && run !== found.run;
    run = found.run;
    takeJobs(found.jobs);
    for (const [key, entry] of pending) {
      if (!entry.isSettled && entry.since < begun && !found.jobs.some((job) => job.key === key)) settle(key, entry).catch(complain);
    }
    if (!wasCutOff && !isNew) return;
    el.problem.hidden = true;
    tell(isNew ? "The studio was started anew, and answers: load the page again before you use the tabs Data and Runs." : "The studio answers again.");
    refreshState().catch((error) => { if (!error.isOffline) complain(error); });
  }

  function cutOff(error) {
    if (el.offline.hidden) tell("");
    const sentence = error.isOffline
      ? "The studio does not answer: it was ended, or is very busy. This page asks on and goes on by itself; versions that "
        + "were finished are kept."
      : `${error.message} Load the page again.`;
    if (el.offline.textContent !== sentence) el.offline.textContent = sentence;
    el.offline.hidden = false;
    root.classList.add("st-cut-off");
    for (const job of state.jobs.filter(isActive)) {
      const line = jobLines.get(job.key);
      if (line) line.said.textContent = `${job.title}: no word since ${job.step ? `step ${job.step} of ${job.steps}` : "it was asked for"}`;
    }
  }

  // A window's name is held by a lock, so that a copy of the window takes another. The page before this one in its window
  // has left a mark, and is waited for however long it takes to go; a copy has none, and gets no lock.
  function holdName(name) {
    const options = sessionStorage.getItem("st-left") ? {} : { signal: AbortSignal.timeout(1000) };
    sessionStorage.removeItem("st-left");
    return new Promise((done) => {
      navigator.locks.request(`st-page-${name}`, options, () => { done(true); return new Promise(() => {}); })
        .catch(() => done(false));
    });
  }
  async function windowName() {
    const drawn = () => Array.from(crypto.getRandomValues(new Uint8Array(16)), (b) => b.toString(16).padStart(2, "0")).join("");
    const before = sessionStorage.getItem("st-page");
    if (before && navigator.locks && await holdName(before)) { recallPending(); return before; }
    const name = drawn();
    if (navigator.locks) await holdName(name);
    sessionStorage.setItem("st-page", name);
    sessionStorage.removeItem("st-pending");
    return name;
  }

  async function finished(job) {
    if (job.state === "failed") complain(new Error(job.sentence));
    else if (job.state === "stopped") tell(`Stopped: ${job.title}.`);
    if (job.state !== "done") {
      if (job.result) {  // some of its edits were applied
        const cause = job.state === "failed" ? "An error ended it" : "It was stopped";
        await tellUnfinished(job.key, job, await ask(`/projects/${job.project}`), cause);
      }
    } else if (!isOpen(job.project)) {
      const project = [...el.projects.options].find((each) => each.value === job.project);
      if (project) tell(`Done in ${project.text}: ${job.title}.`);
    } else if (job.result.version) {
      tell("");
      const before = state.version;
      canUndo((job.result.remarks || []).join("; "), async () => {
        const shown = before && isOpen(job.project) && state.project.versions.find((version) => version.id === before.id);
        if (shown) await selectVersion(shown);
      });
      await reload(job.project, job.result.version);
    }
    else if (job.result.of_object) { el.sound.value = job.result.caption; el.sound.focus(); }
    else if (job.result.record) {
      const found = await ask(`/projects/${job.project}`);
      if (isOpen(job.project)) showThought(found.thought, found.prose);
    } else if (job.result.edits || job.result.question) takeReading(job.result);
    root.dataset.finished = String(Number(root.dataset.finished || 0) + 1);
  }

  // beginning

  function make(tag, given = {}, text = "") {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(given)) {
      if (name === "ariaLabel") made.setAttribute("aria-label", value);
      else made[name] = value;
    }
    if (text) made.textContent = text;
    return made;
  }

  function begin() {
    const id = (name) => document.getElementById(`st-${name}`);
    el = { open: id("open"), projects: id("projects"), save: id("save"), remove: id("delete"), model: id("model"),
      problem: id("problem"), status: id("status"), empty: id("empty"), work: id("work"), stage: id("stage"),
      video: id("video"), frame: id("frame"), overlay: id("overlay"), objectState: id("object-state"), boxX: id("box-x"),
      boxY: id("box-y"), boxW: id("box-w"), boxH: id("box-h"), boxSet: id("box-set"), objectClear: id("object-clear"),
      objectAdd: id("object-add"), objectThink: id("object-think"), play: id("play"), clock: id("clock"), zoomIn: id("zoom-in"), zoomOut: id("zoom-out"),
      zoomAll: id("zoom-all"), strip: id("strip"), wave: id("wave"), from: id("from"), to: id("to"),
      selectNone: id("select-none"), changes: id("changes"), events: id("events"), eventAdd: id("event-add"),
      think: id("think"), background: id("background"), avoid: id("avoid"), prose: id("prose"), caption: id("caption"),
      generate: id("generate"), only: id("only"), words: id("words"), plan: id("plan"), kind: id("kind"),
      sound: id("sound"), planSaid: id("plan-said"), choices: id("choices"), apply: id("apply"), steps: id("steps"), seed: id("seed"),
      offline: id("offline"), rowsSaid: id("rows-said"), boxes: id("boxes"), recover: id("recover"),
      recoverList: id("recover-list"), recoverTake: id("recover-take"), recoverNot: id("recover-not"),
      jobs: id("jobs"), tree: id("tree"), compare: id("compare"), compareSaid: id("compare-said"), switch: id("switch"),
      compareEnd: id("compare-end"), audioA: id("audio-a"), audioB: id("audio-b") };
    const takeFile = guarded(openFile);
    el.open.onchange = () => { if (el.open.files[0]) takeFile(el.open.files[0]); el.open.value = ""; };
    for (const name of ["dragover", "dragleave", "drop"]) {
      root.addEventListener(name, (event) => {
        event.preventDefault();
        root.classList.toggle("st-over", name === "dragover");
        if (name === "drop" && event.dataTransfer.files[0]) takeFile(event.dataTransfer.files[0]);
      });
    }
    el.projects.onchange = guarded(() => openProject(el.projects.value));
    el.remove.onclick = guarded(async () => {
      if (!confirm(`Delete ${state.project.name} with all its versions?`)) return;
      const { id } = state.project;
      await ask(here(), { method: "DELETE" });
      if (isOpen(id)) show(null);
      await refreshState();
    });
    el.save.onclick = guarded(() => save(".studio.zip", here("/export")));
    el.play.onclick = play;
    el.zoomIn.onclick = () => zoom(0.6);
    el.zoomOut.onclick = () => zoom(1.7);
    el.zoomAll.onclick = () => setView(0, length());
    el.from.onchange = el.to.onchange = spanFromFields;
    el.selectNone.onclick = () => { state.span = null; showSpan(); };
    el.eventAdd.onclick = () => {
      const start = Math.max(0, Math.min(state.cursor, state.project.duration_s - 0.1));
      const [from, to] = state.span || [start, Math.min(start + 1, state.project.duration_s)];
      undoThought("");
      state.record.events.push({ sound: "a sound", start_s: Number(from.toFixed(2)), end_s: Number(to.toFixed(2)) });
      showEvents();
      keepThought();
      el.events.lastElementChild.querySelector("input").focus();
    };
    el.background.onchange = el.avoid.onchange = () => { undoThought(""); keepThought(); };
    document.addEventListener("keydown", (event) => {
      const isTyping = event.target.matches("input:not([type=checkbox]), textarea");  // the browser takes back what was typed
      if (isTyping || !root.offsetParent || !(event.ctrlKey || event.metaKey) || event.shiftKey || event.key.toLowerCase() !== "z") return;
      event.preventDefault();
      const newest = undoable.at(-1);
      if (newest) newest(); else tell("There is nothing to take back.");
    });
    el.think.onclick = () => think([]);
    el.generate.onclick = generate;
    el.plan.onclick = plan;
    el.words.onkeydown = (event) => { if (event.key === "Enter") plan(); };
    el.words.oninput = forgetReading;
    el.kind.onchange = () => changeReading({ kind: el.kind.value });
    el.sound.oninput = () => changeReading({ caption: el.sound.value.trim() });
    el.apply.onclick = () => (state.edits.length ? applyReading()
      : apply(el.kind.value, el.sound.value, state.region.length > 0 && !el.sound.value.trim()));
    el.objectAdd.onclick = () => apply("add", el.sound.value, true);
    el.objectThink.onclick = () => think(state.region);
    el.objectClear.onclick = () => { state.clicks = []; state.region = []; showRegion(); };
    el.boxSet.onclick = correctBox;
    el.switch.onclick = switchHeard;
    el.compareEnd.onclick = () => { if (state.hearsOther) switchHeard(); compare(null); };
    el.video.onloadeddata = () => {
      state.pictures = true;
      if (state.cursor && !isPlaying) el.video.currentTime = Math.min(state.cursor, state.project.duration_s);
      placeOverlay();
    };
    el.video.onseeked = () => drawOverlay();
    el.video.onerror = () => {
      if (!el.video.getAttribute("src")) return;
      state.pictures = false;
      el.video.hidden = true;
      el.frame.hidden = false;
      el.frame.src = `/studio/api${here("/frame?at=0")}`;
    };
    el.frame.onload = placeOverlay;
    bindWave();
    bindOverlay();
    new ResizeObserver(() => {
      draw();
      drawStrip();
      placeOverlay();
      clearTimeout(waveTimer);
      waveTimer = setTimeout(() => { if (state.version) loadWave().catch(complain); }, 150);
    }).observe(root);
    addEventListener("pagehide", () => {
      sessionStorage.setItem("st-left", "yes");
      fetch(`/studio/api/close?page=${page}`, { method: "POST", headers: { "x-studio": "1" }, keepalive: true });
    });
    document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
    guarded(async () => {
      page = await windowName();
      poll();
      root.dataset.ready = "yes";
      await offerRecovery();
      const found = await refreshState();
      if (!found.projects.length) return;
      el.projects.options[0].textContent = "choose one to go on";
      const last = sessionStorage.getItem("st-project");
      if (!found.projects.some((each) => each.id === last)) return;
      el.projects.value = last;
      await openProject(last);
    })();
  }

  const wait = setInterval(() => {
    root = document.getElementById("studio");
    if (!root) return;
    clearInterval(wait);
    begin();
  }, 50);
})();

// The sound editor of the studio. It talks to its own server alone; `page` names this window, whose requests are
// stopped when it is closed.
(() => {
  "use strict";
  const page = crypto.randomUUID ? crypto.randomUUID() : Array.from(crypto.getRandomValues(new Uint8Array(16)),
    (b) => b.toString(16).padStart(2, "0")).join("");
  const state = { project: null, version: null, other: null, hearsOther: false, cursor: 0, view: [0, 1], span: null,
    clicks: [], region: [], cross: null, strip: null, record: { events: [], background: [], follows: [], avoid: [] },
    jobs: [], wave: null, parentWave: null, pictures: false };
  const seen = new Set();
  let root, el;

  // requests to the server

  async function ask(path, options = {}) {
    const headers = { "x-studio": "1" };
    if (options.json !== undefined) {
      headers["content-type"] = "application/json";
      options.body = JSON.stringify(options.json);
    }
    let answer;
    try {
      answer = await fetch(`/studio/api${path}`, { method: options.method || "GET", headers, body: options.body });
    } catch {
      throw new Error("The studio does not answer: was it ended? Versions that were finished are kept.");
    }
    if (options.as && answer.ok) return answer[options.as]();
    let content = {};
    try { content = await answer.json(); } catch { /* an error without a sentence */ }
    if (!answer.ok) throw new Error(content.sentence || `The studio refused it (${answer.status}).`);
    return content;
  }

  const here = (rest = "") => `/projects/${state.project.id}${rest}`;
  // an answer may come after another project was opened, and is not that one's
  const isOpen = (id) => state.project !== null && state.project.id === id;
  const versionPath = (id, rest) => here(`/versions/${id}${rest}`);

  function tell(sentence) { el.status.textContent = sentence; }
  function complain(error) {
    el.problem.textContent = error.message || String(error);
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
    el.model.textContent = found.model;
    el.model.hidden = !found.model;
    el.objectThink.hidden = !found.writer;
    const shown = state.project ? state.project.id : "";
    el.projects.replaceChildren(new Option(found.projects.length ? "choose one" : "none yet", ""),
      ...found.projects.map((each) => new Option(each.name, each.id)));
    el.projects.value = shown;
    return found;
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
    Object.assign(state, { project, version: null, other: null, hearsOther: false, cursor: 0, span: null, clicks: [],
      region: [], strip: null, wave: null, parentWave: null });
    delete el.wave.dataset.drawn;
    el.work.hidden = el.save.hidden = el.remove.hidden = !project;
    el.empty.hidden = !!project;
    sessionStorage.setItem("st-project", project ? project.id : "");  // of this tab, for when it is loaded again
    if (!project) return;
    el.stage.hidden = el.strip.hidden = !project.has_pictures;
    state.view = [0, Math.max(project.duration_s, 0.1)];
    for (const field of [el.background, el.avoid]) field.value = field.defaultValue;
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
    showClock();
    selectVersion(project.versions.at(-1) || null).catch(complain);
  }

  // versions

  async function selectVersion(version) {
    const was = state.version ? state.version.id : null;
    state.version = version;
    if (!version) { draw(); showChanges(); return; }
    if (was !== version.id) {
      const at = state.cursor;
      const playing = !audio().paused;
      el.audioA.src = `/studio/api${versionPath(version.id, "/sound.wav")}`;
      el.audioA.currentTime = Math.min(at, version.duration_s);
      if (playing && !state.hearsOther) el.audioA.play();
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

  function showTree() {
    const children = (parent) => state.project.versions.filter((each) => each.parent === parent);
    const list = (parent) => {
      const found = children(parent);
      if (!found.length) return null;
      // a chain of edits stays in one column: only branches are moved in
      const ul = make("ul", { className: found.length > 1 && parent !== null ? "st-tree st-branch" : "st-tree" });
      for (const version of found) {
        const li = make("li");
        const button = make("button", { className: "st-button st-version" },
          `${version.id} · ${version.title} · ${version.duration_s.toFixed(2)} s`);
        button.dataset.version = version.id;
        button.setAttribute("aria-pressed", String(!!state.version && state.version.id === version.id));
        if (version.is_same_outside !== null) {
          button.append(make("span", { className: version.is_same_outside ? "st-same" : "st-same st-differs" },
            version.is_same_outside
              ? `unchanged elsewhere ✓ ${version.checked_samples.toLocaleString("en")} samples compared`
              : "changed outside of the span"));
        }
        button.onclick = guarded(() => selectVersion(version));
        li.append(button);
        if (state.version && state.version.id === version.id) li.append(actions(version));
        const below = list(version.id);
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
      box.append(a);
    };
    // a link saves nothing and says nothing where pictures do not go into such a file
    const film = (format, text) => {
      const button = make("button", { className: "st-button" }, text);
      button.onclick = guarded(() => save(`-${version.id}.${format}`, versionPath(version.id, `/export?format=${format}`)));
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
      const { id } = state.project;
      await ask(versionPath(version.id, ""), { method: "DELETE" });
      if (!isOpen(id)) return;
      state.version = null;
      await reload(id, version.parent);
    });
    box.append(remove);
    return box;
  }

  async function save(ending, path) {
    const name = `${state.project.name.replace(/\.[^.]*$/, "")}${ending}`;
    tell(`Writing ${name} …`);
    try {
      const content = await ask(path, { as: "blob" });
      const a = make("a", { href: URL.createObjectURL(content), download: name });
      a.click();
      setTimeout(() => URL.revokeObjectURL(a.href), 60_000);
    } finally { tell(""); }
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
    const playing = !from.paused;
    state.hearsOther = !state.hearsOther;
    const to = audio();
    to.currentTime = Math.min(from.currentTime, to.duration || from.currentTime);
    from.pause();
    if (playing) to.play();
    showCompare();
  }

  // playing

  const audio = () => (state.hearsOther && state.other ? el.audioB : el.audioA);

  function stopPlaying() {
    el.audioA.pause();
    el.audioB.pause();
    el.video.pause();
    el.play.textContent = "Play";
  }

  function play() {
    if (!state.version) {
      if (!state.pictures) return;
      if (el.video.paused) el.video.play(); else el.video.pause();
      el.play.textContent = el.video.paused ? "Play" : "Pause";
      return;
    }
    const sound = audio();
    if (!sound.paused) { stopPlaying(); return; }
    if (state.cursor >= state.version.duration_s - 0.02) seek(0);
    sound.currentTime = state.cursor;
    sound.play().catch(complain);
    if (state.pictures && state.cursor < state.project.duration_s) el.video.play().catch(() => {});
    el.play.textContent = "Pause";
    requestAnimationFrame(follow);
  }

  function follow() {
    const sound = audio();
    if (sound.paused) { el.play.textContent = "Play"; el.video.pause(); return; }
    state.cursor = sound.currentTime;
    if (state.pictures && Math.abs(el.video.currentTime - state.cursor) > 0.15 && state.cursor < state.project.duration_s) {
      el.video.currentTime = state.cursor;
    }
    if (state.cursor > state.view[1]) {
      const wide = state.view[1] - state.view[0];
      setView(state.cursor, state.cursor + wide);
    }
    showClock();
    draw();
    drawOverlay();
    requestAnimationFrame(follow);
  }

  let frameTimer = 0;
  function seek(time) {
    state.cursor = Math.min(Math.max(0, time), length());
    for (const each of [el.audioA, el.audioB]) if (each.src) each.currentTime = state.cursor;
    if (state.project.has_pictures) {
      const at = Math.min(state.cursor, Math.max(0, state.project.duration_s - 0.01));
      if (state.pictures) el.video.currentTime = at;
      else {
        clearTimeout(frameTimer);
        frameTimer = setTimeout(() => { el.frame.src = `/studio/api${here(`/frame?at=${at.toFixed(3)}`)}`; }, 120);
      }
    }
    showClock();
    draw();
    drawOverlay();
  }

  function showClock() {
    el.clock.textContent = `${state.cursor.toFixed(2)} of ${length().toFixed(2)} s`;
    el.wave.setAttribute("aria-valuemax", length().toFixed(2));
    el.wave.setAttribute("aria-valuenow", state.cursor.toFixed(2));
    el.wave.setAttribute("aria-valuetext", `${state.cursor.toFixed(2)} seconds`);
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
    for (let tick = Math.ceil(state.view[0] / step) * step; tick < state.view[1]; tick += step) {
      pen.fillStyle = colour("--st-line") || "#d4d4d8";
      pen.fillRect(toX(tick), 0, 1, HEIGHT - 14);
      pen.fillStyle = colour("--st-quiet");
      const text = step >= 60 ? `${Math.round(tick / 60)} min` : `${Number(tick.toFixed(2))} s`;
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
    el.from.value = state.span ? state.span[0].toFixed(2) : "";
    el.to.value = state.span ? state.span[1].toFixed(2) : "";
    draw();
  }

  function setSpan(from, to) {
    const [a, b] = from <= to ? [from, to] : [to, from];
    state.span = b - a < 0.005 ? null : [Math.max(0, a), b];
    showSpan();
  }

  function spanFromFields() {
    const from = el.from.value === "" ? null : Number(el.from.value);
    const to = el.to.value === "" ? null : Number(el.to.value);
    state.span = from !== null && to !== null && to > from ? [from, to] : null;
    draw();
  }

  function showChanges() {
    const version = state.version;
    if (!version || version.parent === null || version.span === null) {
      el.changes.textContent = "";
      return;
    }
    const spans = version.changed.slice(0, 4).map(([a, b]) => `${a.toFixed(2)} to ${b.toFixed(2)} s`).join(", ");
    el.changes.textContent = (version.changed.length ? `Changed against version ${version.parent}: ${spans}`
      + (version.changed.length > 4 ? ", and more" : "") + " (orange; grey: before). " : `Nothing differs from version ${version.parent}. `)
      + (version.is_same_outside ? `Unchanged elsewhere: ${version.checked_samples.toLocaleString("en")} samples outside of `
        + `${version.span[0].toFixed(2)} to ${version.span[1].toFixed(2)} s were compared, and are the same numbers.`
        : "Samples outside of the span differ.");
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
      ? `Followed from ${region[0].at_s.toFixed(1)} to ${region.at(-1).at_s.toFixed(1)} s by ${state.clicks.length} `
        + `${state.clicks.length === 1 ? "click" : "clicks"}. Go to another time and click again where the box is wrong.`
      : "Click an object in the picture to follow it; drag a box where a click is not enough. Clicks at other times correct its way.";
    el.objectThink.disabled = el.objectAdd.disabled = el.objectClear.disabled = el.only.disabled = !region.length;
    if (!region.length) el.only.checked = false;
    const box = boxAt(state.cursor);
    for (const [field, key] of [[el.boxX, "x"], [el.boxY, "y"], [el.boxW, "width"], [el.boxH, "height"]]) {
      field.value = box ? Math.round(box[key]) : "";
    }
    drawOverlay();
  }

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
        input.onchange = () => { change(input.value); keepThought(); };
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
    if (focused) {
      const after = [...el.events.children].find((row) => eventOfRow.get(row) === place[0]);
      if (after) controls(after)[place[1]].focus();
    }
    draw();
  }

  const phrases = (text) => text.split(",").map((each) => each.trim()).filter(Boolean);

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
    else draw();
    const [path, { id }, record] = [here("/thought"), state.project, structuredClone(state.record)];
    saved = saved.catch(() => {}).then(async () => {
      const kept = await ask(path, { method: "PUT", json: { record, known: knownThoughts.get(id) } });
      knownThoughts.set(id, kept.record);
      if (isOpen(id)) el.prose.textContent = kept.prose;
    });
    const saving = saved;
    guarded(() => saving)();
  }

  // requests to the models

  const isActive = (job) => job.state === "waiting" || job.state === "running";
  const post = async (path, body, id = state.project.id) => {
    const job = await ask(`/projects/${id}${path}`, { method: "POST", json: { page, ...body } });
    takeJobs([...state.jobs.filter(isActive), job]);
  };
  const sampler = () => ({ seed: Number(el.seed.value) || 0, steps: Number(el.steps.value) || 24 });

  const generate = guarded(async () => {
    const { id } = state.project;
    const asked = { caption: el.caption.value, region: el.only.checked ? state.region : [], ...sampler() };
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
    const from = el.from.value === "" ? null : Number(el.from.value);
    const to = el.to.value === "" ? null : Number(el.to.value);
    await post("/edit", { version: state.version.id, kind, caption, start_s: kind === "extend" ? null : from, end_s: to,
      region: withRegion ? state.region : [], ...sampler() });
  });

  const plan = guarded(async () => {
    if (!state.version) throw new Error("There is no sound to edit yet: generate one first.");
    const { id } = state.project;
    const span = state.span ? { start_s: state.span[0], end_s: state.span[1] } : {};
    const asked = { page, version: state.version.id, instruction: el.words.value, ...span };
    await saved;
    const found = await ask(`/projects/${id}/plan`, { method: "POST", json: asked });
    if (found.job) takeJobs([...state.jobs, found.job]);
    else if (isOpen(id)) showPlan(found.plan);
  });

  function showPlan(found) {
    el.kind.value = found.kind;
    el.sound.value = found.caption;
    if (found.start_s !== null && found.end_s !== null) setSpan(found.start_s, found.end_s);
    else { state.span = null; showSpan(); }
    const where = found.end_s === null ? "in the whole sound" : `from ${found.start_s.toFixed(2)} to ${found.end_s.toFixed(2)} s`;
    el.planSaid.textContent = `Understood: ${found.kind} ${found.caption || (state.region.length ? "the object" : "what fits")} ${where}. `
      + "Change it here if it is not what you meant, then apply.";
    el.apply.focus();
  }

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

  function takeJobs(jobs) {
    state.jobs = jobs;
    const shown = jobs.filter(isActive);
    for (const [key, line] of jobLines) {
      if (!shown.some((job) => job.key === key)) { line.item.remove(); jobLines.delete(key); }
    }
    for (const job of shown) {
      const { said, bar } = jobLines.get(job.key) || jobLine(job);
      said.textContent = job.state === "waiting" ? `${job.title}: ${job.place} before it`
        : job.step ? `${job.title}: step ${job.step} of ${job.steps}` : `${job.title} …`;
      bar.hidden = job.state === "waiting";
      if (job.steps) { bar.max = job.steps; bar.value = job.step; }
    }
    for (const job of jobs) {
      if (seen.has(job.key) || isActive(job)) continue;
      seen.add(job.key);
      finished(job).catch(complain);
    }
  }

  async function finished(job) {
    if (job.state === "failed") complain(new Error(job.sentence));
    else if (job.state === "stopped") tell(`Stopped: ${job.title}.`);
    else if (!isOpen(job.project)) {
      const project = [...el.projects.options].find((each) => each.value === job.project);
      if (project) tell(`Done in ${project.text}: ${job.title}.`);
    } else if (job.result.version) { tell(""); await reload(job.project, job.result.version); }
    else if (job.result.of_object) { el.sound.value = job.result.caption; el.sound.focus(); }
    else if (job.result.record) {
      const found = await ask(`/projects/${job.project}`);
      if (isOpen(job.project)) showThought(found.thought, found.prose);
    } else if (job.result.plan) showPlan(job.result.plan);
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
      sound: id("sound"), planSaid: id("plan-said"), apply: id("apply"), steps: id("steps"), seed: id("seed"),
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
      state.record.events.push({ sound: "a sound", start_s: Number(from.toFixed(2)), end_s: Number(to.toFixed(2)) });
      showEvents();
      keepThought();
      el.events.lastElementChild.querySelector("input").focus();
    };
    el.background.onchange = el.avoid.onchange = keepThought;
    el.think.onclick = () => think([]);
    el.generate.onclick = generate;
    el.plan.onclick = plan;
    el.words.onkeydown = (event) => { if (event.key === "Enter") plan(); };
    el.apply.onclick = () => apply(el.kind.value, el.sound.value, state.region.length > 0 && !el.sound.value.trim());
    el.objectAdd.onclick = () => apply("add", el.sound.value, true);
    el.objectThink.onclick = () => think(state.region);
    el.objectClear.onclick = () => { state.clicks = []; state.region = []; showRegion(); };
    el.boxSet.onclick = () => followObject({ x: Number(el.boxX.value), y: Number(el.boxY.value),
      width: Number(el.boxW.value), height: Number(el.boxH.value) });
    el.switch.onclick = switchHeard;
    el.compareEnd.onclick = () => { if (state.hearsOther) switchHeard(); compare(null); };
    el.video.onloadeddata = () => { state.pictures = true; placeOverlay(); };
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
    const events = new EventSource(`/studio/api/events?page=${page}`);
    events.onmessage = (event) => takeJobs(JSON.parse(event.data));
    addEventListener("pagehide", () => {
      fetch(`/studio/api/close?page=${page}`, { method: "POST", headers: { "x-studio": "1" }, keepalive: true });
    });
    guarded(async () => {
      const found = await refreshState();
      if (!found.projects.length) return;
      el.projects.options[0].textContent = "choose one to go on";
      const last = sessionStorage.getItem("st-project");
      if (!found.projects.some((each) => each.id === last)) return;
      el.projects.value = last;
      await openProject(last);
    })();
    root.dataset.ready = "yes";
  }

  const wait = setInterval(() => {
    root = document.getElementById("studio");
    if (!root || root.dataset.ready) return;
    clearInterval(wait);
    begin();
  }, 50);
})();

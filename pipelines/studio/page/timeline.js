// The time line: waveform, pictures in a strip, view and selection.
import { complain, el, guarded, root, state } from "./state.js";
import { play, seek, timeOf, timeText } from "./player.js";
import { ask, versionPath } from "./requests.js";
import { fullLength } from "./versions.js";
import { changeReading, planned } from "./words.js";

let waveNumber = 0;
export async function loadWave() {
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
export function loadWaveSoon(delay_ms) {
  clearTimeout(waveTimer);
  waveTimer = setTimeout(() => loadWave().catch(complain), delay_ms);
}
export function setView(start, end) {
  const longest = fullLength();
  const wide = Math.min(Math.max(end - start, 0.02), longest);
  start = Math.min(Math.max(0, start), longest - wide);
  state.view = [start, start + wide];
  draw();
  drawStrip();
  loadWaveSoon(60);
}

export function zoom(by, around = state.cursor) {
  const [start, end] = state.view;
  const centre = Math.min(Math.max(around, start), end);
  setView(centre - (centre - start) * by, centre + (end - centre) * by);
}

const toX = (time) => ((time - state.view[0]) / (state.view[1] - state.view[0])) * el.wave.clientWidth;
const toTime = (x) => state.view[0] + (x / el.wave.clientWidth) * (state.view[1] - state.view[0]);

export function sized(canvas, height) {
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
export function draw() {
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
  const longest = fullLength();
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

export function drawStrip() {
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

export function showSpan() {
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

export const spanFromFields = guarded(() => {
  const [from, to] = [timeOf(el.from), timeOf(el.to)];
  state.span = from !== null && to !== null && to > from ? [from, to] : null;
  if (state.span) changeReading({ start_s: from, end_s: to });
  draw();
});

export const between = ([from, to]) => (to < 60 ? `${from.toFixed(2)} to ${to.toFixed(2)} s` : `${timeText(from)} to ${timeText(to)}`);
export function showChanges() {
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
export const isBrowsers = (event) => (event.ctrlKey || event.metaKey || event.altKey) && !event.getModifierState("AltGraph");

export function bindWave() {
  let begun = null;
  const at = (event) => toTime(event.clientX - el.wave.getBoundingClientRect().left);
  el.wave.addEventListener("pointerdown", (event) => {
    begun = at(event);
    el.wave.setPointerCapture(event.pointerId);
  });
  el.wave.addEventListener("pointermove", (event) => {
    if (begun !== null && Math.abs(toX(at(event)) - toX(begun)) > 4) setSpan(begun, Math.min(at(event), fullLength()));
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
      Home: () => seek(0), End: () => seek(fullLength()), " ": play, Escape: () => { state.span = null; showSpan(); },
      "[": () => setSpan(state.cursor, state.span && state.span[1] > state.cursor ? state.span[1] : fullLength()),
      "]": () => setSpan(state.span && state.span[0] < state.cursor ? state.span[0] : 0, state.cursor),
      "+": () => zoom(0.6), "-": () => zoom(1.7),
    }[event.key];
    if (work) { event.preventDefault(); work(); }
  });
}

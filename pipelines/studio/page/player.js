// Playing: one clock, the sound's, which the picture follows; without a sound it is the picture's. And times as texts.
import { complain, el, state } from "./state.js";
import { drawOverlay, showBox } from "./picture.js";
import { here } from "./requests.js";
import { draw, setView } from "./timeline.js";
import { fullLength } from "./versions.js";

export const audio = () => (state.hearsOther && state.other ? el.audioB : el.audioA);
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
export let isPlaying = false;
let startNumber = 0;  // of the newest start: an older one ends where it waits
let isStarting = false;
let frame = 0;
let jump = { begun: 0, cost_s: 0.1 };
let lateness = [];  // seconds of the picture behind the sound
let turn = { until: 0, isMade: false, settled: 0 };
let turnCost_s = MOST_COST_S / 2;

export function stopPlaying() {
  isPlaying = isStarting = false;
  startNumber++;
  for (const each of [el.audioA, el.audioB, el.video]) each.pause();
  setTurn(0, 0);
  el.play.textContent = "Play";
  if (state.project) showBox();
}

export function play() {
  if (isPlaying) { stopPlaying(); return; }
  if (!state.version && !state.pictures) return;
  const end = state.version ? state.version.duration_s : state.project.duration_s;
  start(state.cursor >= end - 0.02 ? 0 : state.cursor);
}

// Move to a time; sound and picture go on together when both are there.
export async function start(time) {
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
export function seek(time) {
  state.cursor = Math.min(Math.max(0, time), fullLength());
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
export function clock(time, decimals = 2) {
  return time < 60 ? `${time.toFixed(decimals)} s` : timeText(time, decimals);
}
export function timeText(time, decimals = 2) {
  const unit = 10 ** decimals;
  const parts = Math.round(time * unit);
  const seconds = ((parts % (60 * unit)) / unit).toFixed(decimals);
  const minutes = Math.floor(parts / (60 * unit));
  if (!minutes) return seconds;
  const late = seconds.padStart(decimals ? 3 + decimals : 2, "0");
  return minutes < 60 ? `${minutes}:${late}` : `${Math.floor(minutes / 60)}:${String(minutes % 60).padStart(2, "0")}:${late}`;
}
export function timeOf(field) {
  const text = field.value.trim().replace(",", ".");
  if (text === "") return null;
  if (!/^(\d+:){0,2}(\d+\.?\d*|\.\d+)$/.test(text)) {
    throw new Error(`"${field.value}" is no time: give seconds, or minutes and seconds as 1:04.5.`);
  }
  return text.split(":").reduce((sum, part) => 60 * sum + Number(part), 0);
}

export function showClock() {
  el.clock.textContent = fullLength() < 60 ? `${state.cursor.toFixed(2)} of ${fullLength().toFixed(2)} s`
    : `${timeText(state.cursor)} of ${timeText(fullLength())}`;
  el.wave.setAttribute("aria-valuemax", fullLength().toFixed(2));
  el.wave.setAttribute("aria-valuenow", state.cursor.toFixed(2));
  el.wave.setAttribute("aria-valuetext", fullLength() < 60 ? `${state.cursor.toFixed(2)} seconds` : timeText(state.cursor));
}

// Jobs of the models: their lines, their ends, and the connection to the server that does them.
import { complain, el, guarded, make, page, root, state, tell } from "./state.js";
import { refreshState, reload } from "./projects.js";
import { ask, isOpen } from "./requests.js";
import { canUndo, showThought } from "./thought.js";
import { selectVersion } from "./versions.js";
import { editInWords, isActive, plan, post, takeReading } from "./words.js";

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
export function remember(job, order) {
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

export function takeJobs(jobs) {
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
export async function poll() {
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
export async function windowName() {
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

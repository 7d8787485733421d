// The page of `audiollm review`: a list of segments, the chosen one with its sound, and corrections by keyboard.
import { CorrectionQueue, ask } from "./queue.js";

const id = (name) => document.getElementById(name);
const SLOWER = 0.6;
const MARGIN_S = 1;
const STEP_S = 0.05;
const LONGEST_S = 120;
const PAUSE_MS = 120;
const PAGE_ROWS = 50;
const known = new Map(); // rows by their keys: a correction of one that is not listed any more finds it here
const undone = []; // what each correction of this window replaced, the last one at the end
const conflicts = [];
let columns = [];
let rows = [];
let total = 0;
let offset = 0; // rows of the query before those of this page
let filters = [];
let chosen = -1;
let playing = null;
let soundTimer = 0;

// ---------------------------------------------------------------- elements

function element(tag, content = [], attributes = {}) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== null) made.setAttribute(name, value);
  made.append(...[content].flat());
  return made;
}

function tell(sentence) {
  id("problem").textContent = sentence;
  id("problem").hidden = !sentence;
}

const row = () => rows[chosen];
const seconds = (value) => Number(value).toFixed(2);

// ---------------------------------------------------------------- the list

const LISTED = [
  ["state", "state", "state narrow"], ["file", "recording", ""], ["start_s", "span in s", "number"], ["speaker", "speaker", ""], ["text", "text", "text narrow"],
];

function listedColumns() {
  const names = LISTED.map(([name]) => name);
  const more = [id("sort").value, ...filters.map((filter) => filter.column)];
  const extra = [...new Set(more)].filter((name) => name && !names.includes(name) && name !== "judgement");
  return [...LISTED, ...extra.map((name) => [name, name, "number"])];
}

function cellContent(shown, name) {
  if (name === "state") {
    const word = shown.judgement || (shown.state === "dropped" ? "dropped" : "kept");
    const style = shown.judgement || (shown.state === "dropped" ? "dropped-state" : "");
    return element("span", (shown.isWaiting ? "… " : "") + word, { class: style });
  }
  if (name === "start_s") return `${seconds(shown.start_s)} – ${seconds(shown.end_s)}`;
  if (name === "text") return shown.text || element("span", shown.refusal ? `text refused: ${shown.refusal}` : "no text", { class: "quiet" });
  if (name.startsWith("heard.")) return shown.heard[name.slice(6)] || "";
  const value = name in shown ? shown[name] : shown.measures[name];
  return typeof value === "number" ? String(Math.round(value * 1000) / 1000) : String(value ?? "");
}

function drawList() {
  const listed = listedColumns();
  const sorted = id("sort").value;
  id("rows").tHead.rows[0].replaceChildren(...listed.map(([name, title, style]) => {
    const isSorted = name === sorted;
    const arrow = isSorted ? (id("order").value ? " ↓" : " ↑") : "";
    const button = element("button", title + arrow, { tabindex: "-1", "data-column": name });
    const order = isSorted ? (id("order").value ? "descending" : "ascending") : null;
    return element("th", button, { scope: "col", class: style, "aria-sort": order });
  }));
  id("rows").tBodies[0].replaceChildren(...rows.map((shown, place) => drawRow(shown, place, listed)));
  const from = total ? offset + 1 : 0;
  id("total").textContent = `${from} to ${offset + rows.length} of ${total} segments`;
  id("page-back").disabled = offset === 0;
  id("page-on").disabled = offset + rows.length >= total;
}

function drawRow(shown, place, listed = listedColumns()) {
  const cells = listed.map(([name, , style]) => element("td", cellContent(shown, name), { class: style }));
  const drawn = element("tr", cells, {
    id: `row-${place}`, class: shown.state, "aria-selected": String(place === chosen), "data-place": place,
  });
  return drawn;
}

function redraw(key) {
  const place = rows.findIndex((shown) => shown.key === key);
  if (place < 0) return;
  rows[place] = known.get(key);
  document.getElementById(`row-${place}`)?.replaceWith(drawRow(rows[place], place));
}

function query() {
  const [column, compared] = id("preset").value.split(" ");
  const preset = column ? [{ column, operation: compared.match(/^!?=/)[0], value: compared.replace(/^!?=/, "") }] : [];
  return {
    words: id("words").value, filters: [...preset, ...filters], sort: id("sort").value, is_descending: id("order").value !== "", limit: PAGE_ROWS,
  };
}

// `edge`: {after: key} or {before: key} of the page that is left
async function load(place = 0, edge = {}) {
  try {
    const answer = await ask(`rows?query=${encodeURIComponent(JSON.stringify({ ...query(), ...edge }))}`);
    // what is on its way to the server is newer than what the server says
    rows = answer.rows.map((shown) => (known.get(shown.key)?.isWaiting ? known.get(shown.key) : shown));
    for (const shown of rows) known.set(shown.key, shown);
    ({ total, offset } = answer);
    tell("");
  } catch (error) {
    tell(error.message);
    return;
  }
  chosen = Math.min(place < 0 ? rows.length - 1 : place, rows.length - 1);
  drawList();
  choose(chosen);
}

function choose(place) {
  const before = chosen;
  chosen = place;
  for (const old of [before, place]) document.getElementById(`row-${old}`)?.setAttribute("aria-selected", String(old === place));
  const drawn = document.getElementById(`row-${place}`);
  if (drawn) id("rows").setAttribute("aria-activedescendant", drawn.id);
  else id("rows").removeAttribute("aria-activedescendant");
  if (drawn) reveal(drawn);
  stop();
  drawDetail();
  if (rows[place]) freshen(rows[place].key);
}

// Scroll the list alone: the page stays where it is
function reveal(drawn) {
  const box = id("scroll");
  const top = drawn.offsetTop - id("rows").tHead.offsetHeight;
  const bottom = drawn.offsetTop + drawn.offsetHeight - box.clientHeight;
  if (top < box.scrollTop) box.scrollTop = top;
  else if (bottom > box.scrollTop) box.scrollTop = bottom;
}

// What others have saved since the list was loaded
async function freshen(key) {
  const fresh = await ask(`rows/${key}`).catch(() => null);
  const shown = known.get(key);
  if (fresh && fresh.revision > shown.revision && !shown.isWaiting && !shown.draft) refresh(key, fresh);
}

async function move(step) {
  keepDraft();
  const place = chosen + step;
  if (place >= 0 && place < rows.length) choose(place);
  else await turnPage(step);
}

async function turnPage(step) {
  if (!rows.length || (step > 0 ? id("page-on") : id("page-back")).disabled) return;
  if (step > 0) await load(0, { after: rows[rows.length - 1].key });
  else await load(-1, { before: rows[0].key });
}

// ---------------------------------------------------------------- the chosen segment

const FIELDS = ["text", "speaker", "start", "end"];

function windowOf(shown) {
  const from = Math.max(0, shown.start_s - MARGIN_S);
  const last = shown.recording_s ?? Infinity;
  const to = Math.min(shown.end_s + MARGIN_S, Math.max(last, shown.end_s), from + LONGEST_S);
  return { from: Math.round(from * 1000) / 1000, to: Math.round(to * 1000) / 1000 };
}

function drawDetail() {
  const shown = row();
  id("none").hidden = Boolean(shown);
  id("segment").hidden = !shown;
  if (!shown) return;
  const draft = shown.draft || {};
  id("title").textContent = `${shown.file} ${shown.id}`;
  id("text").value = draft.text ?? shown.text;
  id("speaker").value = draft.speaker ?? shown.speaker;
  id("start").value = draft.start ?? round(shown.start_s);
  id("end").value = draft.end ?? round(shown.end_s);
  markDraft();
  drawState(shown);
  drawHeard(shown);
  drawMeasures(shown);
  drawSound(shown);
  id("speakers").replaceChildren(...[...new Set([...known.values()].map((any) => any.speaker))].map((name) => element("option", [], { value: name })));
}

const round = (value) => String(Math.round(value * 1000) / 1000);

function drawState(shown) {
  const parts = [shown.judgement ? `${shown.judgement}${shown.by ? ` by ${shown.by}` : ""}` : "not judged yet", shown.state];
  for (const name of ["language", "kind", "split"]) if (shown[name]) parts.push(shown[name]);
  if (shown.text_source) parts.push(`text: ${shown.text_source}`);
  id("state").textContent = parts.join(" · ");
  const why = [];
  if (shown.drop) why.push(["dropped", `${shown.drop}${shown.drop_reason ? `: ${shown.drop_reason}` : ""}`]);
  if (shown.refusal) why.push(["text refused", `${shown.refusal}${shown.refusal_reason ? `: ${shown.refusal_reason}` : ""}`]);
  if (shown.note) why.push(["note", shown.note]);
  const machine = shown.machine;
  if ("text" in shown.fields && machine.text !== shown.text) why.push(["text of the annotation", machine.text || "none"]);
  if ("speaker" in shown.fields) why.push(["speaker of the annotation", machine.speaker || "none"]);
  if ("start_s" in shown.fields) why.push(["span of the annotation", `${seconds(machine.start_s)} to ${seconds(machine.end_s)} s; measures are those of it until annotate runs again`]);
  id("why").replaceChildren(...why.map(([title, text]) => element("div", [element("dt", title), element("dd", text, { class: title.startsWith("text refused") || title === "dropped" ? "refusal" : null })])));
}

function drawHeard(shown) {
  const words = new Set(id("text").value.toLowerCase().match(/[\p{L}\p{N}']+/gu) || []);
  id("heard").replaceChildren(...Object.entries(shown.heard).map(([name, text], place) => {
    const marked = text.split(/(\s+)/).map((word) => {
      const plain = word.toLowerCase().match(/[\p{L}\p{N}']+/u)?.[0];
      return plain && words.size && !words.has(plain) ? element("mark", word) : word;
    });
    const button = element("button", [element("kbd", String(place + 1)), " Take"], { "data-take": place, "aria-label": `${place + 1} Take the text of ${name}` });
    return element("li", [button, element("span", name), element("span", text ? marked : "nothing", { class: text ? null : "quiet" })]);
  }));
  if (!Object.keys(shown.heard).length) id("heard").append(element("li", element("span", "none has heard it", { class: "quiet" })));
}

function drawMeasures(shown) {
  const listed = Object.entries(shown.measures);
  id("measures").querySelector("summary").textContent = `${listed.length} measures`;
  id("measures").querySelector("dl").replaceChildren(...listed.map(([name, value]) => element("div", [element("dt", name), element("dd", String(Math.round(value * 1000) / 1000))])));
}

function addressOf(kind, shown) {
  const { from, to } = windowOf(shown);
  return `${kind === "sound" ? "sounds" : "pictures"}/${shown.key}.${kind === "sound" ? "wav" : "png"}?start_s=${from}&end_s=${to}`;
}

// Who goes on at once asks for no sound and no picture: corrections would wait for them in the browser's six connections
function drawSound(shown) {
  clearTimeout(soundTimer);
  if (id("spectrogram").getAttribute("src") !== addressOf("picture", shown)) {
    id("spectrogram").removeAttribute("src");
    id("sound").removeAttribute("src");
    id("sound-problem").hidden = true;
    soundTimer = setTimeout(loadSound, PAUSE_MS);
  }
  const { from, to } = windowOf(shown);
  id("spectrogram").alt = `Spectrogram of ${seconds(from)} to ${seconds(to)} s`;
  drawSpan();
}

function loadSound() {
  clearTimeout(soundTimer);
  const shown = row();
  if (!shown || id("sound").getAttribute("src")) return;
  id("sound").src = addressOf("sound", shown);
  id("spectrogram").src = addressOf("picture", shown);
}

// The picture of the next row, once this one is there
function loadNextPicture() {
  const following = rows[chosen + 1];
  if (following) new Image().src = addressOf("picture", following);
}

function drawSpan() {
  const { from, to } = windowOf(row());
  const percent = (value) => Math.min(100, Math.max(0, (100 * (value - from)) / (to - from)));
  id("span").style.left = `${percent(Number(id("start").value))}%`;
  id("span").style.right = `${100 - percent(Number(id("end").value))}%`;
}

async function soundFailed() {
  const shown = row();
  if (!shown) return;
  let sentence = "The recording cannot be played.";
  try {
    await ask(addressOf("sound", shown));
  } catch (error) {
    if (!(error instanceof SyntaxError)) sentence = error.message;
  }
  id("sound-problem").textContent = sentence;
  id("sound-problem").hidden = false;
  id("spectrogram").removeAttribute("src");
}

// ---------------------------------------------------------------- sound

function play(rate) {
  if (playing === rate) {
    stop();
    return;
  }
  loadSound();
  const { from } = windowOf(row());
  const sound = id("sound");
  sound.playbackRate = rate;
  sound.currentTime = Math.max(0, Number(id("start").value) - from);
  playing = rate;
  id("head").hidden = false;
  sound.play().catch(() => stop());
  requestAnimationFrame(follow);
}

function follow() {
  if (playing === null || !row()) return;
  const { from, to } = windowOf(row());
  const time = from + id("sound").currentTime;
  id("head").style.left = `${(100 * (time - from)) / (to - from)}%`;
  if (time >= Number(id("end").value) || id("sound").ended) stop();
  else requestAnimationFrame(follow);
}

function stop() {
  playing = null;
  id("sound").pause();
  id("head").hidden = true;
}

// ---------------------------------------------------------------- corrections

function values() {
  return Object.fromEntries(FIELDS.map((name) => [name, id(name).value]));
}

function isChanged(name) {
  const shown = row();
  const before = { text: shown.text, speaker: shown.speaker, start: round(shown.start_s), end: round(shown.end_s) };
  return id(name).value !== before[name];
}

function keepDraft() {
  if (row()) row().draft = FIELDS.some(isChanged) ? values() : undefined;
}

function markDraft() {
  for (const name of FIELDS) id(name).classList.toggle("changed", isChanged(name));
  id("save").disabled = !FIELDS.some(isChanged);
}

function discardDraft() {
  if (!row()) return;
  row().draft = undefined;
  drawDetail();
}

// The fields of the chosen row with what stands in the inputs; null where a span cannot be
function editedFields() {
  const shown = row();
  const fields = { ...shown.fields };
  const { text, speaker, start, end } = values();
  if (isChanged("text")) fields.text = text;
  if (isChanged("speaker")) fields.speaker = speaker.trim();
  if (isChanged("start") || isChanged("end")) {
    fields.start_s = Number(start);
    fields.end_s = Number(end);
    const last = shown.recording_s ?? Infinity;
    if (start === "" || end === "" || !(fields.start_s >= 0) || fields.end_s - fields.start_s < 0.02) {
      tell("The end must lie behind the start.");
      return null;
    }
    if (fields.end_s > last + 0.01) {
      tell(`The recording ends at ${seconds(last)} s: the end lies behind it.`);
      return null;
    }
  }
  if (fields.speaker === "") {
    tell("The speaker is empty: give a name.");
    return null;
  }
  tell("");
  return fields;
}

function correct(change) {
  if (!row()) return false;
  const fields = editedFields();
  if (!fields) return false;
  const shown = row();
  Object.assign(fields, change);
  if (change.keep && (fields.text ?? shown.text)) fields.text ??= shown.text;
  undone.push({ key: shown.key, fields: shown.fields });
  send(shown, fields);
  return true;
}

function send(shown, fields) {
  const revision = shown.revision;
  const judgement = fields.keep === true ? "accepted" : fields.keep === false ? "rejected" : Object.keys(fields).length ? "corrected" : "";
  const machine = shown.machine;
  Object.assign(shown, {
    fields, judgement, isWaiting: true, draft: undefined, revision: revision + 1, by: id("by").value.trim(),
    text: fields.text ?? machine.text ?? "", speaker: fields.speaker ?? machine.speaker ?? "",
    start_s: fields.start_s ?? machine.start_s, end_s: fields.end_s ?? machine.end_s,
  });
  if (fields.keep !== undefined) shown.state = fields.keep ? "kept" : "dropped";
  known.set(shown.key, shown);
  queue.push({ key: shown.key, revision, fields, by: shown.by });
  redraw(shown.key);
  if (row()?.key === shown.key) drawDetail();
}

function save() {
  return FIELDS.some(isChanged) ? correct({}) : true;
}

async function judge(keep) {
  if (correct({ keep })) await move(1);
}

async function undo() {
  const last = undone.pop();
  if (!last) {
    tell("There is nothing to undo in this window.");
    return;
  }
  tell("");
  const place = rows.findIndex((shown) => shown.key === last.key);
  const shown = known.get(last.key);
  send(shown, last.fields);
  if (place >= 0) choose(place);
}

function take(place) {
  const texts = Object.values(row()?.heard || {});
  if (place >= texts.length) return;
  id("text").value = texts[place];
  drafted();
}

function nudge(name, step) {
  const value = Math.max(0, Number(id(name).value) + step);
  id(name).value = round(value);
  drafted();
}

function drafted() {
  keepDraft();
  markDraft();
  drawSpan();
  if (row()) drawHeard(row());
}

// ---------------------------------------------------------------- the queue

function refresh(key, fresh) {
  const before = known.get(key);
  known.set(key, { ...fresh, draft: before?.draft, isWaiting: false });
  redraw(key);
  if (row()?.key === key) drawDetail();
}

const queue = new CorrectionQueue({
  sent(item, fresh, isFollowed) {
    if (!isFollowed) refresh(item.key, fresh);
    counted();
  },
  conflict(item, fresh, sentence) {
    refresh(item.key, fresh);
    for (let place = undone.length - 1; place >= 0; place--) if (undone[place].key === item.key) undone.splice(place, 1);
    conflicts.push({ item, fresh, sentence });
    showConflict();
  },
  async refused(item, sentence) {
    tell(`Not saved: ${sentence}`);
    try {
      refresh(item.key, await ask(`rows/${item.key}`));
    } catch { /* the sentence says why */ }
  },
  state(waiting, sentence) {
    id("saved").textContent = waiting ? `${waiting} not saved yet` : "all saved";
    id("saved").classList.toggle("late", Boolean(sentence));
    if (sentence) tell(sentence);
    else if (id("problem").textContent.startsWith("The server does not answer")) tell("");
    document.body.dataset.waiting = waiting;
  },
});

function showConflict() {
  const conflict = conflicts[0];
  id("conflict").hidden = !conflict;
  if (!conflict) {
    id("rows").focus();
    return;
  }
  const { item, fresh, sentence } = conflict;
  id("conflict-title").textContent = `${fresh.file}, ${seconds(fresh.start_s)} s: ${sentence}`;
  const judged = { true: "accepted", false: "rejected" };
  const lines = [["text", fresh.text, item.fields.text ?? fresh.machine.text ?? ""], ["speaker", fresh.speaker, item.fields.speaker ?? fresh.machine.speaker ?? ""],
    ["span", `${seconds(fresh.start_s)} – ${seconds(fresh.end_s)}`, `${seconds(item.fields.start_s ?? fresh.machine.start_s)} – ${seconds(item.fields.end_s ?? fresh.machine.end_s)}`],
    ["judgement", judged[fresh.fields.keep] ?? "by the rules", judged[item.fields.keep] ?? "by the rules"]];
  id("conflict-fields").replaceChildren(...lines.map(([name, theirs, mine]) => element("tr", [element("th", name, { scope: "row" }), element("td", theirs), element("td", mine, { class: theirs === mine ? null : "differs" })])));
  id("conflict").focus();
}

function endConflict(isMine) {
  const { item } = conflicts.shift();
  if (isMine) {
    const shown = known.get(item.key);
    undone.push({ key: item.key, fields: shown.fields });
    send(shown, item.fields);
  }
  showConflict();
}

async function counted() {
  try {
    const facts = await ask("facts");
    id("name").textContent = facts.name;
    id("counts").textContent = `${facts.judged} of ${facts.rows} segments judged`;
    columns = facts.columns;
    id("lost").hidden = !facts.lost.length;
    id("lost").querySelector("summary").textContent = `${facts.lost.length} corrections without a segment: the recording is cut otherwise now, or gone`;
    id("lost").querySelector("ul").replaceChildren(...facts.lost.map((lost) => element("li", `${lost.file}, ${lost.span}: ${JSON.stringify(lost.fields)}`)));
  } catch (error) {
    tell(error.message);
  }
}

// ---------------------------------------------------------------- search and filters

function fillColumns() {
  const options = (first) => [element("option", first[1], { value: first[0] }), ...columns.map(({ name }) => element("option", name, { value: name }))];
  id("sort").replaceChildren(...options(["", "recording and time"]));
  id("filter-column").replaceChildren(...columns.map(({ name }) => element("option", name, { value: name })));
  id("filter-column").value = columns.some(({ name }) => name === "judgement") ? "judgement" : "state";
}

function drawFilters() {
  id("filters").replaceChildren(...filters.map((filter, place) => {
    const said = `${filter.column} ${filter.operation} ${filter.value || "(empty)"}`;
    return element("li", element("button", [said, " ×"], { "data-filter": place, "aria-label": `Remove the filter ${said}` }));
  }));
}

async function search() {
  keepDraft();
  await load(0);
}

async function addFilter(event) {
  event.preventDefault();
  filters.push({ column: id("filter-column").value, operation: id("filter-operation").value, value: id("filter-value").value });
  id("filter-value").value = "";
  drawFilters();
  await search();
  id("rows").focus();
}

// ---------------------------------------------------------------- keys

const KEYS = {
  n: () => move(1), arrowdown: () => move(1), p: () => move(-1), arrowup: () => move(-1),
  a: () => judge(true), r: () => judge(false), u: undo, " ": () => row() && play(1), s: () => row() && play(SLOWER),
  t: () => edit("text"), k: () => edit("speaker"), f: () => { id("search-box").open = true; id("words").focus(); }, enter: save, escape: discardDraft,
  "[": () => nudge("start", -STEP_S), "]": () => nudge("start", STEP_S), "{": () => nudge("end", -STEP_S), "}": () => nudge("end", STEP_S),
  "?": () => { id("keys").open = !id("keys").open; id("keys").scrollIntoView({ block: "nearest" }); },
};

function edit(name) {
  if (!row()) return;
  id(name).focus();
  id(name).select();
}

function inField(event) {
  if (event.isComposing || !FIELDS.includes(event.target.id)) return;
  if (event.key === "Escape") discardDraft();
  else if (event.key !== "Enter" || event.shiftKey) return;
  else if (event.ctrlKey || event.metaKey) judge(true);
  else if (!save()) return event.preventDefault();
  event.preventDefault();
  id("rows").focus();
}

document.addEventListener("keydown", (event) => {
  const isField = event.target.matches("input, textarea, select");
  if (isField) return inField(event);
  if (event.ctrlKey || event.metaKey || event.altKey || !id("conflict").hidden) return;
  const key = event.key.toLowerCase();
  const isButton = event.target.matches("button, summary");
  if (isButton && (key === " " || key === "enter")) return;
  if (!id("keys-on").checked && key.length === 1 && key !== " ") return;
  if (/^[1-9]$/.test(key)) take(Number(key) - 1);
  else if (KEYS[key]) KEYS[key]();
  else return;
  event.preventDefault();
});

// ---------------------------------------------------------------- begin

id("rows").tBodies[0].addEventListener("click", (event) => {
  const drawn = event.target.closest("tr");
  if (!drawn) return;
  keepDraft();
  choose(Number(drawn.dataset.place));
});
id("rows").tHead.addEventListener("click", (event) => {
  const column = event.target.closest("button")?.dataset.column;
  if (!column) return;
  id("order").value = id("sort").value === column && !id("order").value ? "down" : "";
  id("sort").value = column;
  search();
});
id("filters").addEventListener("click", (event) => {
  const place = event.target.closest("button")?.dataset.filter;
  if (place === undefined) return;
  filters.splice(Number(place), 1);
  drawFilters();
  search();
});
id("heard").addEventListener("click", (event) => {
  const place = event.target.closest("button")?.dataset.take;
  if (place !== undefined) take(Number(place));
});
for (const name of FIELDS) id(name).addEventListener("input", drafted);
for (const name of ["words", "preset", "sort", "order"]) id(name).addEventListener("change", search);
id("search").addEventListener("submit", (event) => {
  if (document.activeElement === id("words")) {
    event.preventDefault();
    search().then(() => id("rows").focus());
  } else addFilter(event);
});
for (const [name, act] of Object.entries({
  play: () => play(1), slow: () => play(SLOWER), accept: () => judge(true), reject: () => judge(false), save, undo,
  "keep-theirs": () => endConflict(false), "put-mine": () => endConflict(true),
  "page-back": () => turnPage(-1), "page-on": () => turnPage(1),
})) id(name).addEventListener("click", act);
id("spectrogram").addEventListener("error", soundFailed);
id("spectrogram").addEventListener("load", loadNextPicture);
id("by").value = localStorage.getItem("audiollm-review-name") || "";
id("by").addEventListener("change", () => localStorage.setItem("audiollm-review-name", id("by").value.trim()));
window.addEventListener("beforeunload", (event) => {
  keepDraft();
  if (queue.items.length || [...known.values()].some((shown) => shown.draft)) event.preventDefault();
});

id("search-box").open = !matchMedia("(max-width: 900px)").matches;
await counted();
fillColumns();
await load(0);
id("rows").focus();
document.body.dataset.ready = "yes";

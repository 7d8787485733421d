// The chain of thought, and the way back from changes of it.
import { el, guarded, make, state, tell } from "./state.js";
import { clock } from "./player.js";
import { ask, here, isOpen } from "./requests.js";
import { draw } from "./timeline.js";

const knownThoughts = new Map();  // of each project, as the server has it: another tab may change it
export function showThought(record, prose) {
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
export function showEvents() {
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
export const wrongRows = () => state.record.events.flatMap((event, number) => {
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
export let saved = Promise.resolve();
export function keepThought() {
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
export const undoable = [];
const MOST_UNDOABLE = 50;
export function canUndo(sentence, undo) {
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
export function undoThought(sentence) {
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

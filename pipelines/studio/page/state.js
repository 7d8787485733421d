// What all parts of the sound editor share: its state and elements, and what it tells.

// the name of this window, whose requests are stopped when it is closed; it is kept when the window is loaded again
export let page = "";
export const state = { project: null, version: null, other: null, hearsOther: false, cursor: 0, view: [0, 1], span: null, edits: [],
  clicks: [], region: [], cross: null, strip: null, record: { events: [], background: [], follows: [], avoid: [] },
  jobs: [], wave: null, parentWave: null, pictures: false, hasModel: true };
export let root, el;  // all of the editor, and its elements by name

export function tell(sentence, ...buttons) {
  showSentence(el.status, sentence);
  el.status.append(...buttons.flatMap((button) => [" ", button]));
}
// `code` in a sentence stands between backticks
export function showSentence(element, sentence) {
  element.replaceChildren(...sentence.split("`").map((part, n) => (n % 2 ? make("code", {}, part) : part)));
}
export function complain(error) {
  showSentence(el.problem, error.message || String(error));
  el.problem.hidden = false;
  el.problem.scrollIntoView({ block: "nearest" });
}
export function guarded(work) {
  return async (...given) => {
    el.problem.hidden = true;
    try { await work(...given); } catch (error) { complain(error); }
  };
}

export function make(tag, given = {}, text = "") {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (name === "ariaLabel") made.setAttribute("aria-label", value);
    else made[name] = value;
  }
  if (text) made.textContent = text;
  return made;
}

export function setPage(name) { page = name; }

export function findElements(studio) {
  root = studio;
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
}

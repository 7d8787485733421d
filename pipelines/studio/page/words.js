// Edits in words and by fields: asked for, read, changed, applied.
import { poll, remember, takeJobs } from "./jobs.js";
import { el, guarded, make, page, state } from "./state.js";
import { timeOf } from "./player.js";
import { ask, isOpen } from "./requests.js";
import { saved, wrongRows } from "./thought.js";
import { between, draw } from "./timeline.js";

export const isActive = (job) => job.state === "waiting" || job.state === "running";
export const post = async (path, body, id = state.project.id) => {
  const job = await ask(`/projects/${id}${path}`, { method: "POST", json: { page, ...body } });
  remember(job, { path, body });
  takeJobs([...state.jobs.filter(isActive), job]);
  poll();
};
const sampler = () => ({ seed: Number(el.seed.value) || 0, steps: Number(el.steps.value) || 24 });

export const generate = guarded(async () => {
  const { id } = state.project;
  const asked = { caption: el.caption.value, region: el.only.checked ? state.region : [], ...sampler() };
  const wrong = wrongRows();
  if (wrong.length) throw new Error(`${wrong.join(". ")}. Change it, or remove it from the table.`);
  await saved;
  await post("/generate", asked, id);
});

export const think = guarded(async (region) => {
  const { id } = state.project;
  await saved.catch(() => {});
  await post("/think", { region }, id);
});

export const apply = guarded(async (kind, caption, withRegion) => {
  if (!state.version) throw new Error("There is no sound to edit yet: generate one first.");
  const [from, to] = [timeOf(el.from), timeOf(el.to)];
  if (kind !== "extend" && from === null && to === null && !(withRegion && state.region.length)) {
    throw new Error("Nothing says where: select seconds on the waveform, click an object, or say it in words and read them.");
  }
  await post("/edit", { version: state.version.id, kind, caption, start_s: kind === "extend" ? null : from, end_s: to,
    region: withRegion ? state.region : [], ...sampler() });
});

export const plan = guarded(async () => {
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

export const planned = (edit) => `${edit.kind === "inpaint" ? "fill" : edit.kind} `
  + (edit.caption || ({ mute: "", inpaint: "with what fits", extend: "with what fits" }[edit.kind] ?? "the object"));

export const editInWords = (edit) => `${planned(edit).trim()} from ${between([edit.start_s, edit.end_s])}`;

export function takeReading(found) {
  state.edits = found.edits || [];
  if (state.edits.length) {
    el.kind.value = state.edits[0].kind;
    el.sound.value = state.edits[0].caption;
  }
  showReading(found);
  if (state.edits.length) el.apply.focus();
}

export function forgetReading() {
  if (!state.edits.length && !el.planSaid.textContent) return;
  state.edits = [];
  showReading();
}

// an edit that was read alone is changed by the fields and the selection; several are not what the fields say
export function changeReading(changes) {
  if (state.edits.length !== 1) { forgetReading(); return; }
  Object.assign(state.edits[0], changes);
  showReading();
}

export function showReading(found = {}) {
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

export const applyReading = guarded(async () => {
  await post("/edits", { version: state.version.id, edits: state.edits, region: state.region, ...sampler() });
  forgetReading();
});

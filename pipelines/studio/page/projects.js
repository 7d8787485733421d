// Projects: listed, opened, taken over from other browsers, shown.
import { complain, el, guarded, make, showSentence, state, tell } from "./state.js";
import { showRegion } from "./picture.js";
import { clock, showClock, stopPlaying } from "./player.js";
import { ask, here, isOpen } from "./requests.js";
import { showThought, undoable } from "./thought.js";
import { drawStrip, showSpan } from "./timeline.js";
import { selectVersion, showTree } from "./versions.js";
import { post, showReading } from "./words.js";

export async function refreshState() {
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
export async function offerRecovery() {
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

export async function openFile(file) {
  tell(`Opening ${file.name} …`);
  let found;
  try {
    found = await ask(`/projects?name=${encodeURIComponent(file.name)}`, { method: "POST", body: file });
  } finally { tell(""); }
  show(found);
  await refreshState();
  if (found.thinks) await post("/think", { region: [] }, found.id);
}

export async function openProject(id) {
  if (!id) { show(null); return; }
  const found = await ask(`/projects/${id}`);
  if (el.projects.value === id) show(found);
}

export async function reload(id, select) {
  const found = await ask(`/projects/${id}`);
  if (!isOpen(id)) return;
  state.project = found;
  const wanted = found.versions.find((each) => each.id === select)
    || found.versions.find((each) => state.version && each.id === state.version.id) || found.versions.at(-1) || null;
  showTree();
  await selectVersion(wanted);
}

export function show(project) {
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

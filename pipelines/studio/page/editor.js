// The sound editor of the studio: it binds elements to what they do, and begins.
import { poll, windowName } from "./jobs.js";
import { el, findElements, guarded, page, root, setPage, state, tell } from "./state.js";
import { bindOverlay, correctBox, drawOverlay, placeOverlay, showRegion } from "./picture.js";
import { isPlaying, play } from "./player.js";
import { offerRecovery, openFile, openProject, refreshState, show } from "./projects.js";
import { ask, here, isOpen } from "./requests.js";
import { keepThought, showEvents, undoThought, undoable } from "./thought.js";
import { bindWave, draw, drawStrip, loadWaveSoon, setView, showSpan, spanFromFields, zoom } from "./timeline.js";
import { compare, fullLength, save, switchHeard } from "./versions.js";
import { apply, applyReading, changeReading, forgetReading, generate, plan, think } from "./words.js";

function begin(studio) {
  findElements(studio);
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
  el.zoomAll.onclick = () => setView(0, fullLength());
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
    loadWaveSoon(150);
  }).observe(root);
  addEventListener("pagehide", () => {
    sessionStorage.setItem("st-left", "yes");
    fetch(`/studio/api/close?page=${page}`, { method: "POST", headers: { "x-studio": "1" }, keepalive: true });
  });
  document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
  guarded(async () => {
    setPage(await windowName());
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
  const studio = document.getElementById("studio");
  if (!studio) return;
  clearInterval(wait);
  begin(studio);
}, 50);

// Versions of the sound: their tree, exports, comparison of two at equal loudness.
import { complain, el, guarded, make, state, tell } from "./state.js";
import { audio, clock, isPlaying, start } from "./player.js";
import { reload } from "./projects.js";
import { ask, isOpen, versionPath } from "./requests.js";
import { canUndo } from "./thought.js";
import { draw, loadWave, showChanges } from "./timeline.js";

export async function selectVersion(version) {
  const was = state.version ? state.version.id : null;
  state.version = version;
  if (!version) { draw(); showChanges(); return; }
  if (was !== version.id) {
    el.audioA.src = `/studio/api${versionPath(version.id, "/sound.wav")}`;
    if (isPlaying && !state.hearsOther) start(Math.min(state.cursor, version.duration_s));
    const longest = fullLength();
    if (state.view[1] > longest || was === null) state.view = [0, longest];
    else if (state.view[0] === 0) state.view = [0, longest];
  }
  setVolumes();
  showTree();
  showChanges();
  await loadWave();
}

export const fullLength = () => Math.max(state.project.has_pictures ? state.project.duration_s : 0.1,
  ...state.project.versions.map((each) => each.duration_s));

const DEEPEST = 6;
export function showTree() {
  const children = (parent) => state.project.versions.filter((each) => each.parent === parent);
  const list = (parent, depth = 0) => {
    const found = children(parent);
    if (!found.length) return null;
    // each edit stands to the right of what it was made from, up to a depth at which its title still has room
    const ul = make("ul", { className: depth === 0 ? "st-tree" : depth <= DEEPEST ? "st-tree st-branch" : "st-tree st-below" });
    for (const version of found) {
      const li = make("li");
      const button = make("button", { className: "st-button st-version" },
        `${version.id} · ${version.title} · ${clock(version.duration_s)}`
        + (version.edit_count > 1 ? ` · edit ${version.edit_number} of ${version.edit_count}` : ""));
      button.dataset.version = version.id;
      button.setAttribute("aria-pressed", String(!!state.version && state.version.id === version.id));
      if (version.is_same_outside !== null) {
        const isDifferent = !version.is_same_outside;
        button.append(make("span", { className: isDifferent ? "st-same st-differs" : "st-same" },
          isDifferent ? "changed outside of the span"
            : version.checked_samples ? `unchanged elsewhere ✓ ${version.checked_samples.toLocaleString("en")} samples compared`
              : "the edit covers the whole sound"));
      }
      button.onclick = guarded(() => selectVersion(version));
      li.append(button);
      if (state.version && state.version.id === version.id) li.append(actions(version));
      const below = list(version.id, depth + 1);
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
    a.onclick = () => { lostBy(version.id, format).then((sentence) => sentence && tell(sentence)).catch(complain); };
    box.append(a);
  };
  // a link saves nothing and says nothing where pictures do not go into such a file
  const film = (format, text) => {
    const button = make("button", { className: "st-button" }, text);
    button.onclick = guarded(async () => save(`-${version.id}.${format}`, versionPath(version.id, `/export?format=${format}`),
      await lostBy(version.id, format)));
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
    if (!confirm(`Delete version ${version.id}, ${version.title}?`)) return;
    const { id } = state.project;
    const path = versionPath(version.id, "");
    await ask(path, { method: "DELETE" });
    if (!isOpen(id)) return;
    canUndo(`Version ${version.id} was deleted.`, async () => {
      await ask(`${path}/restore`, { method: "POST" });
      await reload(id, version.id);
    });
    state.version = null;
    await reload(id, version.parent);
  });
  box.append(remove);
  return box;
}

// What the opened file holds and an export does not take over, as a sentence; "" where it takes all.
async function lostBy(version, format) {
  const { lost } = await ask(versionPath(version, `/lost?format=${format}`));
  return lost.length ? `Not kept, as .${format} does not take it: ${lost.join(", ")}.` : "";
}

export async function save(ending, path, remark = "") {
  const name = `${state.project.name.replace(/\.[^.]*$/, "")}${ending}`;
  tell(`Writing ${name} … ${remark}`);
  try {
    const content = await ask(path, { as: "blob" });
    const a = make("a", { href: URL.createObjectURL(content), download: name });
    a.click();
    setTimeout(() => URL.revokeObjectURL(a.href), 60_000);
  } finally { tell(remark); }
}

export function compare(other) {
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

export function switchHeard() {
  const from = audio();
  state.hearsOther = !state.hearsOther;
  const to = audio();
  to.currentTime = Math.min(from.currentTime, to.duration || from.currentTime);
  from.pause();
  if (isPlaying) to.play().catch(complain);
  showCompare();
}

// The object in the picture: clicks, boxes, and what follows it.
import { el, guarded, state, tell } from "./state.js";
import { clock } from "./player.js";
import { ask, here, isOpen } from "./requests.js";
import { isBrowsers, sized } from "./timeline.js";

const shownPicture = () => (el.frame.hidden ? el.video : el.frame);

export function placeOverlay() {
  if (!state.project || !state.project.has_pictures) return;
  const picture = shownPicture();
  const outer = picture.parentElement.getBoundingClientRect();
  const box = picture.getBoundingClientRect();
  const ratio = state.project.width / state.project.height;
  let width = box.width;
  let height = box.width / ratio;
  if (height > box.height) { height = box.height; width = height * ratio; }
  Object.assign(el.overlay.style, { width: `${width}px`, height: `${height}px`,
    left: `${box.left - outer.left + (box.width - width) / 2}px`, top: `${box.top - outer.top + (box.height - height) / 2}px` });
  drawOverlay();
}

function boxAt(time) {
  const region = state.region;
  if (!region.length) return null;
  let n = region.findIndex((each) => each.at_s >= time);
  if (n === -1) return region.at(-1);
  if (n === 0) return region[0];
  const [a, b] = [region[n - 1], region[n]];
  const share = (time - a.at_s) / (b.at_s - a.at_s);
  const mixed = {};
  for (const key of ["x", "y", "width", "height"]) mixed[key] = a[key] + share * (b[key] - a[key]);
  return mixed;
}

export function drawOverlay(dragged = null) {
  if (!state.project || !state.project.has_pictures) return;
  const height = el.overlay.clientHeight;
  const [pen, width] = sized(el.overlay, height);
  const scale = width / state.project.width;
  const box = dragged || boxAt(state.cursor);
  if (box) {
    pen.lineWidth = 4;
    pen.strokeStyle = "#000";
    pen.strokeRect(box.x * scale, box.y * scale, box.width * scale, box.height * scale);
    pen.lineWidth = 2;
    pen.strokeStyle = "#facc15";
    pen.strokeRect(box.x * scale, box.y * scale, box.width * scale, box.height * scale);
  }
  if (state.cross && document.activeElement === el.overlay) {
    const [x, y] = [state.cross[0] * scale, state.cross[1] * scale];
    for (const [wide, ink] of [[4, "#000"], [2, "#fff"]]) {
      pen.lineWidth = wide;
      pen.strokeStyle = ink;
      pen.beginPath();
      pen.moveTo(x - 10, y); pen.lineTo(x + 10, y); pen.moveTo(x, y - 10); pen.lineTo(x, y + 10);
      pen.stroke();
    }
  }
}

const followObject = guarded(async (click) => {
  const at = Math.min(state.cursor, state.project.duration_s);
  const clicks = [...state.clicks.filter((each) => Math.abs(each.at_s - at) > 0.06), { at_s: at, ...click }];
  const { id } = state.project;
  tell("Following the object …");
  try {
    const found = await ask(here("/region"), { method: "POST", json: { clicks } });
    if (!isOpen(id)) return;
    state.clicks = clicks;
    state.region = found.region;
  } finally { tell(""); }
  showRegion();
});

export function showRegion() {
  const region = state.region;
  el.objectState.textContent = region.length
    ? `Followed from ${region[0].at_s.toFixed(1)} to ${clock(region.at(-1).at_s, 1)} by ${state.clicks.length} `
      + `${state.clicks.length === 1 ? "click" : "clicks"}. Go to another time and click again where the box is wrong.`
    : "Click an object in the picture to follow it; drag a box where a click is not enough. Clicks at other times correct its way.";
  el.objectThink.disabled = el.objectClear.disabled = el.only.disabled = !region.length;
  el.objectAdd.disabled = !region.length || !state.hasModel;
  if (!region.length) el.only.checked = false;
  showBox();
  drawOverlay();
}

const boxFields = () => [[el.boxX, "x"], [el.boxY, "y"], [el.boxW, "width"], [el.boxH, "height"]];
// The box of the time that is shown: it is this one that is corrected.
export function showBox() {
  const box = boxAt(state.cursor);
  for (const [field, key] of boxFields()) field.value = box ? Math.round(box[key]) : "";
}
export const correctBox = guarded(async () => {
  const box = Object.fromEntries(boxFields().map(([field, key]) => [key, field.value === "" ? NaN : Number(field.value)]));
  if (!Object.values(box).every(Number.isFinite)) {
    throw new Error("Give x, y, width and height of the box at the time that is shown, or drag it in the picture.");
  }
  await followObject(box);
});

export function bindOverlay() {
  let begun = null;
  const at = (event) => {
    const box = el.overlay.getBoundingClientRect();
    const scale = state.project.width / box.width;
    return [(event.clientX - box.left) * scale, (event.clientY - box.top) * scale];
  };
  const boxOf = (a, b) => ({ x: Math.max(0, Math.min(a[0], b[0])), y: Math.max(0, Math.min(a[1], b[1])),
    width: Math.abs(a[0] - b[0]), height: Math.abs(a[1] - b[1]) });
  el.overlay.addEventListener("pointerdown", (event) => {
    begun = at(event);
    el.overlay.setPointerCapture(event.pointerId);
  });
  el.overlay.addEventListener("pointermove", (event) => { if (begun) drawOverlay(boxOf(begun, at(event))); });
  el.overlay.addEventListener("pointerup", (event) => {
    if (!begun) return;
    state.cross = at(event);
    const box = boxOf(begun, at(event));
    const small = 6 * state.project.width / el.overlay.clientWidth;
    if (box.width < small && box.height < small) followObject({ x: Math.max(0, begun[0]), y: Math.max(0, begun[1]) });
    else followObject(box);
    begun = null;
  });
  el.overlay.addEventListener("focus", () => {
    state.cross = state.cross || [state.project.width / 2, state.project.height / 2];
    drawOverlay();
  });
  el.overlay.addEventListener("blur", () => drawOverlay());
  el.overlay.addEventListener("keydown", (event) => {
    if (isBrowsers(event)) return;
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (moves && state.cross) {
      event.preventDefault();
      const by = event.shiftKey ? 0.002 : 0.02;
      state.cross = [Math.min(Math.max(0, state.cross[0] + moves[0] * by * state.project.width), state.project.width - 1),
        Math.min(Math.max(0, state.cross[1] + moves[1] * by * state.project.width), state.project.height - 1)];
      drawOverlay();
    } else if (event.key === "Enter" && state.cross) {
      event.preventDefault();
      followObject({ x: state.cross[0], y: state.cross[1] });
    }
  });
}

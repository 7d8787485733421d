// Plays the clips with a line that runs over the spectrogram. Without this the browser's own players are shown.
for (const audio of document.querySelectorAll("audio"))
  audio.addEventListener("play", () => { for (const other of document.querySelectorAll("audio")) if (other !== audio) other.pause(); });
for (const clip of document.querySelectorAll(".clip")) {
  const audio = clip.querySelector("audio"), button = clip.querySelector("button");
  const head = clip.querySelector(".head");
  if (!audio || !button) continue;
  audio.controls = false;
  button.hidden = false;
  const draw = () => {
    head.style.left = 100 * Math.min(1, audio.currentTime / (audio.duration || 1)) + "%";
    if (!audio.paused) requestAnimationFrame(draw);
  };
  const show = () => { clip.classList.toggle("playing", !audio.paused && !audio.ended); };
  button.addEventListener("click", () => { audio.paused ? audio.play() : audio.pause(); });
  audio.addEventListener("play", () => {
    show();
    draw();
  });
  for (const event of ["pause", "ended"]) audio.addEventListener(event, show);
}
// What is wider than its place can be scrolled by keyboard, and only that.
const wide = [...document.querySelectorAll(".wide, .interpreted")];
const reach = () => { for (const place of wide) place.scrollWidth > place.clientWidth ? place.tabIndex = 0 : place.removeAttribute("tabindex"); };
addEventListener("resize", reach);
document.addEventListener("toggle", reach, true);
reach();
// Shows one step of a browser of rollouts at a time, by buttons. Without this all steps stand below one another.
for (const browser of document.querySelectorAll(".browser")) {
  const picker = browser.querySelector(".picker"), steps = [...browser.querySelectorAll(".rollout-step")];
  if (steps.length < 2) continue;
  const show = (chosen) => {
    steps.forEach((step) => { step.hidden = step !== chosen; });
    [...picker.children].forEach((button, place) => { button.setAttribute("aria-pressed", steps[place] === chosen); });
  };
  for (const step of steps) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "step " + step.dataset.step;
    button.addEventListener("click", () => show(step));
    picker.append(button);
  }
  picker.hidden = false;
  show(steps[steps.length - 1]);
}
// A line runs over source and output while the source plays; words that have come out are marked. A click plays from there.
for (const card of document.querySelectorAll(".interpreted")) {
  const audio = card.parentElement.querySelector("audio"), tracks = card.querySelector(".tracks");
  const now = card.querySelector(".now"), seconds = Number(tracks.dataset.seconds);
  const words = [...card.querySelectorAll(".word[data-at]")];
  if (!audio) continue;
  now.hidden = false;
  const draw = () => {
    now.style.left = 100 * Math.min(1, audio.currentTime / seconds) + "%";
    for (const word of words) word.classList.toggle("out", audio.currentTime >= Number(word.dataset.at));
    if (!audio.paused) requestAnimationFrame(draw);
  };
  for (const event of ["play", "seeked", "pause"]) audio.addEventListener(event, draw);
  tracks.addEventListener("click", (click) => {
    const box = tracks.getBoundingClientRect();
    audio.currentTime = seconds * (click.clientX - box.left) / box.width;
    audio.play();
  });
}
// Shows the segments of one fate, or of one reason, that have a text in them.
const filter = document.querySelector(".filter");
if (filter) {
  const fate = filter.querySelector("select"), text = filter.querySelector("input"), count = filter.querySelector("output");
  const cards = [...document.querySelectorAll(".segments > article")];
  const apply = () => {
    const wanted = text.value.trim().toLowerCase();
    let number = 0;
    for (const card of cards) {
      const group = card.dataset.group;
      const fits = fate.value === "all" || fate.value === group || (fate.value === "dropped" && group !== "0");
      card.hidden = !(fits && card.dataset.search.includes(wanted));
      number += !card.hidden;
    }
    count.textContent = `${number} of ${cards.length}`;
  };
  filter.hidden = false;
  for (const control of [fate, text]) control.addEventListener("input", apply);
  apply();
}

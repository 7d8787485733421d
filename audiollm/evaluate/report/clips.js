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

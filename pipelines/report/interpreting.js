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

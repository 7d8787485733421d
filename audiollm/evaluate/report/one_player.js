// Starting one player stops the others.
for (const audio of document.querySelectorAll("audio"))
  audio.addEventListener("play", () => { for (const other of document.querySelectorAll("audio")) if (other !== audio) other.pause(); });

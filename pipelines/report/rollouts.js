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

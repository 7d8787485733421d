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

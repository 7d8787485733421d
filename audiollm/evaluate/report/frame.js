// What is wider than its place can be scrolled by keyboard, and only that.
const wide = [...document.querySelectorAll(".wide, .interpreted")];
const reach = () => { for (const place of wide) place.scrollWidth > place.clientWidth ? place.tabIndex = 0 : place.removeAttribute("tabindex"); };
addEventListener("resize", reach);
document.addEventListener("toggle", reach, true);
reach();

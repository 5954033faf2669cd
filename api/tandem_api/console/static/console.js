// Of every page: what a reader opened stays open when the server's newer version of it comes.
const opened = new WeakMap();
const name = (details) => details.querySelector("summary")?.textContent ?? "";

document.addEventListener("htmx:before:swap", () => {
  for (const region of document.querySelectorAll("#report, #fleet, #now")) {
    opened.set(region, new Set([...region.querySelectorAll("details[open]")].map(name)));
  }
});
document.addEventListener("htmx:after:swap", () => {
  for (const region of document.querySelectorAll("#report, #fleet, #now")) {
    const before = opened.get(region);
    for (const details of region.querySelectorAll("details")) {
      if (before?.has(name(details))) details.open = true;
    }
  }
});

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

// What does not answer is told, and asked again until it does. Meanwhile the page keeps what it shows.
const AGAIN = 5000;
const banner = document.getElementById("disconnected");
const missed = new Set(); // elements whose last request came to nothing
let leaving = false;

addEventListener("pagehide", () => { leaving = true; });
addEventListener("pageshow", () => { leaving = false; });

function miss(element, words) {
  missed.add(element);
  if (leaving || document.querySelector("#now [data-over=no]")) return; // a run that goes on tells of its own stream
  if (banner.querySelector("b").textContent !== words) banner.querySelector("b").textContent = words;
  banner.hidden = false;
}

// An answer that lacks what the page goes on with, or an error that is not the console's own (a proxy's), is not shown.
const fits = ({ sourceElement: { dataset: { must } }, response, text }) =>
  must ? text.includes(`id="${must}"`) : response.status < 400 || text.includes('role="alert"');

document.addEventListener("htmx:after:request", (event) => {
  const { ctx } = event.detail;
  if (ctx.response.headers.has("HX-Redirect")) return;
  if (fits(ctx)) {
    missed.delete(ctx.sourceElement);
    banner.hidden = true;
    return;
  }
  event.preventDefault();
  const said = new DOMParser().parseFromString(ctx.text, "text/html").querySelector("[role=alert] p:first-child");
  miss(ctx.sourceElement, said?.textContent ?? `The server does not answer as it should (${ctx.response.status}).`);
});
document.addEventListener("htmx:error", ({ detail: { ctx, error } }) => {
  if (!ctx || (error?.name === "AbortError" && ctx.sourceElement.hasAttribute("hx-sync"))) return; // a newer one came
  miss(ctx.sourceElement, "The server does not answer.");
});

// A page that could not be made at all is loaded anew as soon as it can be.
async function reload() {
  const answer = await fetch(location.href).catch(() => null);
  if (answer && answer.status < 500) location.reload();
}

setInterval(() => {
  const away = document.querySelector("[data-away]");
  const asking = away && (away.closest("[data-polled]") || away.closest("[hx-trigger]"));
  if (away && !asking) reload();
  for (const element of missed) if (!element.isConnected) missed.delete(element);
  for (const element of new Set([...missed, ...(asking ? [asking] : [])])) element.dispatchEvent(new Event("again"));
}, AGAIN);

// A run as it happens: the events tell that there is news, and the page's parts are asked of the server anew. Rows are
// written as text, never as markup: every string of a run is untrusted.
const ROWS = 20;
const FIRST_WAIT = 1000, LONGEST_WAIT = 15000;

const now = document.getElementById("now");
const newest = document.getElementById("newest");
const came = document.getElementById("came");
const connection = document.getElementById("connection");
const lost = document.getElementById("lost");
const away = document.getElementById("database-away");

let last = now.dataset.place; // id of the last event: where the stream goes on
let source = null, wait = FIRST_WAIT, over = false, rows = 0;

const tell = (name) => document.body.dispatchEvent(new Event(name));

function connected(on, words) {
  lost.hidden = on || over;
  connection.dataset.state = on ? "live" : "lost";
  if (connection.textContent !== words) connection.textContent = words;
}

function cell(text, left) {
  const td = document.createElement("td");
  td.textContent = text;
  if (left) td.className = "l";
  return td;
}

function show(row) {
  const layer = row.layer >= 0 ? ` layer ${row.layer}` : "";
  const tr = document.createElement("tr");
  tr.append(
    cell(row.step.toLocaleString("en")), cell(`${row.phase}/${row.module}${layer} ${row.tensor}`, true), cell(row.rank),
    cell(row.mismatched === null ? "never received" : row.mismatched.toLocaleString("en")),
    cell(row.elements.toLocaleString("en")), cell(row.cause, true), cell(row.replay.replaceAll("_", " "), true),
  );
  return tr;
}

const handlers = {
  attempt: () => tell("run:step"),
  conditions: () => tell("run:step"),
  progress: () => tell("run:step"),
  mismatches: (data) => {
    rows += data.mismatches.length;
    came.textContent = rows.toLocaleString("en");
    newest.prepend(...data.mismatches.slice(-ROWS).reverse().map(show));
    while (newest.rows.length > ROWS) newest.lastElementChild.remove();
    if (document.querySelector("#mismatches [data-first]")) tell("run:rows");
  },
  database: (data) => { away.hidden = data.answers; },
  verdict: () => end("The run has ended."),
  failed: () => end("The run has ended."),
};

function end(words) {
  over = true;
  source.close();
  connected(true, words);
  away.hidden = true;
  tell("run:over");
}

function open() {
  const place = last ? `?after=${encodeURIComponent(last)}` : "";
  source = new EventSource(`/v1/runs/${now.dataset.run}/events${place}`);
  source.onopen = () => {
    wait = FIRST_WAIT;
    connected(true, "Live: this page follows the run.");
  };
  source.onerror = () => {
    if (over) return;
    connected(false, "Not connected.");
    // The browser comes back by itself after a cut, with Last-Event-ID, but never after an answer that is an error.
    if (source.readyState === EventSource.CLOSED) again();
  };
  for (const [kind, handle] of Object.entries(handlers)) {
    source.addEventListener(kind, (event) => {
      if (event.lastEventId) last = now.dataset.last = event.lastEventId;
      handle(JSON.parse(event.data));
    });
  }
}

function again() {
  source.close();
  tell("run:step"); // whoever is signed out is sent to the form
  setTimeout(open, wait);
  wait = Math.min(2 * wait, LONGEST_WAIT);
}

addEventListener("pagehide", () => source.close());
addEventListener("pageshow", (event) => { if (event.persisted && !over) open(); });
open();

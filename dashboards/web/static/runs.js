// The table of runs: the start of the pages.
import { element, fixed, interval, live, make, reach, table, whole } from "./common.js";

const form = element("chosen");
const when = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "short" });

function nameOf(row) {
  const box = make("input", { type: "checkbox", name: "run", value: row.run, "aria-label": `choose ${row.run}` });
  box.checked = Boolean(form.querySelector(`input[value="${CSS.escape(row.run)}"]:checked`));
  return make("span", { className: "pick" }, box, make("a", { href: `/stream?${new URLSearchParams({ run: row.run })}` }, make("bdi", { text: row.run })));
}

function stateOf(row) {
  if (row.problem) return make("span", { text: "cannot be read", className: "state unreadable", title: row.problem });
  const state = row.state === "finished" && !row.prompts ? "empty" : row.state;
  return make("span", { text: state, className: `state ${state}` });
}

function checkOf(row) {
  if (!row.check) return "–";
  const { judged, mismatches } = row.check;
  const text = mismatches ? `${whole(mismatches)} mismatches` : "passed";
  return make("span", { text, className: `state ${mismatches ? "unreadable" : "finished"}`, title: `${whole(judged)} judged decisions were derived again from their rows` });
}

// How many times as fast as without drafts, as the end of the run says it (store/query/findings.py).
function timesOf({ times }) {
  if (!times) return "–";
  const range = make("small", { text: ` ${fixed(2)(times.low)}–${fixed(2)(times.high)}`, title: "interval of 95%" });
  return make("span", {}, make("b", { text: fixed(2)(times.value) }), range);
}

const COLUMNS = [
  { title: "run", of: nameOf, by: (row) => row.run },
  { title: "state", of: stateOf, by: (row) => row.state },
  { title: "started", of: (row) => (row.started === null ? null : when.format(row.started * 1000)), by: (row) => row.started, short: true },
  { title: "target", of: (row) => row.targets.join(", ") },
  { title: "data", of: (row) => row.datasets.join(", ") },
  { title: "learning", of: (row) => ({ true: "on", false: "off" })[row.learning] ?? "–" },
  { title: "tokens / second", of: (row) => row.speed, show: fixed(1), number: true },
  { title: "times without drafts", of: timesOf, by: (row) => row.times?.value ?? null, number: true },
  { title: "prompts", of: (row) => row.prompts, show: whole, number: true },
  { title: "acceptance", of: interval, by: (row) => row.acceptance, number: true },
  { title: "tokens / forward", of: (row) => row.efficiency, show: fixed(2), number: true },
  { title: "drifts", of: (row) => row.drifts, show: whole, number: true },
  { title: "versions", of: (row) => row.versions, show: whole, number: true },
  { title: "check", of: checkOf },
];

const enable = () => { element("compare").disabled = !form.querySelector(":checked"); };

async function update() {
  const rows = await (await reach("/api/runs", { cache: "no-store" })).json();
  const text = JSON.stringify(rows);
  if (form.dataset.shown === text) return;
  form.dataset.shown = text;
  table(element("runs"), COLUMNS, rows, "Runs, the newest first");
  enable();
}

if (form) { // there is none without runs
  live(update);
  form.addEventListener("change", enable);
}

// Queries in SQL.
import { element, make, reach, runs, table, whole } from "./common.js";
import { openEditor } from "./editor.js";
import { isNumber, offerPlot } from "./plot.js";

const recipe = element("recipe");
const LONGEST_ADDRESS = 8000; // characters; servers refuse longer ones
let editor = null;
let answer = null;
let latest = "";
let counted = null; // the query of which rows were counted by a column, and that column
const countBy = element("count-by");

function shown(value) {
  if (value === null) return "";
  if (typeof value === "number") return Number.isInteger(value) ? String(value) : Math.abs(value) < 1e-4 && value ? value.toExponential(3) : value.toFixed(4);
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

const request = (path, more = {}) => reach(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ runs, query: latest, ...more }) });

// A result belongs to the query above it: while another one runs, and if it fails, nothing is shown.
function clear(message = "") {
  answer = null;
  offerPlot(null);
  element("rows").replaceChildren();
  countBy.replaceChildren(new Option("…", ""));
  element("took").textContent = "";
  element("query-problem").textContent = message;
  element("query-problem").hidden = !message;
  document.querySelectorAll(".save").forEach((button) => { button.disabled = true; });
}

async function run() {
  const button = element("go");
  button.disabled = true;
  clear();
  element("took").textContent = "running …";
  latest = editor.read();
  const address = addressOf(latest);
  if (address.length < LONGEST_ADDRESS) history.replaceState(null, "", address);
  try {
    answer = await (await request("/api/sql")).json();
    show();
  } catch (error) {
    clear(error.message);
  }
  button.disabled = false;
}

const addressOf = (query) => {
  const address = new URL(location.href);
  address.searchParams.delete("recipe");
  address.searchParams.set("query", query);
  return address.href;
};

// Numbers of prompts lead to their text, where it is known of which run; counted values lead to the rows that have them.
function linkOf(title, column) {
  const ofRun = answer.columns.indexOf("run");
  if (title === "offset" && (ofRun >= 0 || runs.length === 1)) {
    return (row) => `/text?${new URLSearchParams({ run: ofRun < 0 ? runs[0] : row[ofRun], offset: row[column] })}`;
  }
  if (counted?.query !== latest || column) return null;
  const literal = (value) => (typeof value === "string" ? `'${value.replaceAll("'", "''")}'` : String(value));
  return (row) => addressOf(`SELECT *\nFROM (\n${counted.inner}\n)\nWHERE ${counted.name} IS NOT DISTINCT FROM ${literal(row[column])}`);
}

function columnOf(title, column) {
  const number = isNumber(answer.types[column]);
  const link = linkOf(title, column);
  const value = (row) => row[column];
  const linked = (row) => (typeof value(row) === "object" ? value(row) : make("a", { href: link(row), text: shown(value(row)) || "(empty)" }));
  return { title, of: link ? linked : value, by: value, show: shown, number, text: !number };
}

function count() {
  const inner = latest.trim().replace(/;\s*$/, "");
  const name = `"${countBy.value.replaceAll('"', '""')}"`;
  counted = { inner, name, query: `SELECT ${name}, count(*) AS rows\nFROM (\n${inner}\n)\nGROUP BY ALL\nORDER BY rows DESC` };
  forget();
  editor.write(counted.query);
  run();
}

function show() {
  table(element("rows"), answer.columns.map(columnOf), answer.rows, "Rows of the query");
  offerPlot(answer);
  countBy.append(...answer.columns.map((name) => new Option(name)));
  const seconds = answer.seconds < 0.01 ? "under 0.01" : answer.seconds.toFixed(2);
  const all = `${whole(answer.total)}${answer.more ? " or more" : ""} row${answer.total === 1 ? "" : "s"}`;
  element("took").textContent = `${answer.rows.length < answer.total ? `the first ${whole(answer.rows.length)} of ` : ""}${all}, ${seconds} s`;
  document.querySelectorAll(".save").forEach((button) => { button.disabled = !answer.rows.length; });
}

async function save(kind) {
  try {
    const link = make("a", { href: URL.createObjectURL(await (await request("/api/sql/export", { kind })).blob()), download: `rows.${kind}` });
    link.click();
    URL.revokeObjectURL(link.href);
  } catch (error) {
    element("query-problem").textContent = error.message;
    element("query-problem").hidden = false;
  }
}

function choose() {
  const chosen = recipe.selectedOptions[0];
  element("description").textContent = chosen.dataset.description ?? "";
  if (!chosen.value) return;
  editor.write(chosen.dataset.sql.trim());
  run();
}

function forget() {
  recipe.value = "";
  element("description").textContent = "";
}

if (runs.length) {
  const views = new Map([...document.querySelectorAll(".views details.view")].map((view) => [
    view.querySelector("code").textContent, [...view.querySelectorAll("li")].map((item) => ({ name: item.querySelector("button").dataset.name, type: item.querySelector("small").textContent })),
  ]));
  editor = openEditor(element("editor"), views, run, forget);
  recipe.addEventListener("change", choose);
  countBy.addEventListener("change", () => countBy.value && count());
  element("query-form").addEventListener("submit", (event) => { event.preventDefault(); run(); });
  document.querySelectorAll(".save").forEach((button) => button.addEventListener("click", () => save(button.id)));
  document.querySelectorAll(".views .name").forEach((button) => button.addEventListener("click", () => editor.insert(button.dataset.name)));
  document.querySelectorAll(".recipes button").forEach((button) => button.addEventListener("click", () => {
    recipe.value = button.textContent;
    choose();
    editor.show();
  }));
  const address = new URLSearchParams(location.search);
  const named = address.get("query");
  if (named !== null) {
    editor.write(named);
    run();
  } else if (address.get("recipe")) {
    recipe.value = address.get("recipe");
    choose();
  }
}

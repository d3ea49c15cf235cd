// Queries in SQL.
import { element, make, problem, reach, runs, table, whole } from "./common.js";

const query = element("query");
const recipe = element("recipe");
let answer = null;

function shown(value) {
  if (value === null) return "";
  if (typeof value === "number") return Number.isInteger(value) ? String(value) : Math.abs(value) < 1e-4 && value ? value.toExponential(3) : value.toFixed(4);
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

async function ask() {
  const button = element("go");
  button.disabled = true;
  element("took").textContent = "asking …";
  try {
    const response = await reach("/api/sql", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ runs, query: query.value }) });
    answer = await response.json();
    show();
    problem("");
  } catch (error) {
    element("took").textContent = "";
    problem(error.message);
  }
  button.disabled = false;
}

function show() {
  const number = (type) => /^(u?int|float|double|decimal|halffloat)/.test(type);
  table(element("rows"), answer.columns.map((title, column) => ({
    title, of: (row) => row[column], show: shown, number: number(answer.types[column]), text: !number(answer.types[column]),
  })), answer.rows, "Rows of the query");
  const seconds = answer.seconds < 0.01 ? "under 0.01" : answer.seconds.toFixed(2);
  const all = `${whole(answer.total)}${answer.more ? " or more" : ""} row${answer.total === 1 ? "" : "s"}`;
  element("took").textContent = `${answer.rows.length < answer.total ? `the first ${whole(answer.rows.length)} of ` : ""}${all}, ${seconds} s`;
  element("csv").disabled = !answer.rows.length;
}

// CSV after RFC 4180. A spreadsheet must not interpret a prompt as a formula.
function field(value) {
  const text = value === null ? "" : typeof value === "object" ? JSON.stringify(value) : String(value);
  const safe = typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

function save() {
  const lines = [answer.columns, ...answer.rows].map((row) => row.map(field).join(","));
  const link = make("a", { href: URL.createObjectURL(new Blob([lines.join("\r\n") + "\r\n"], { type: "text/csv" })), download: "rows.csv" });
  link.click();
  URL.revokeObjectURL(link.href);
}

function choose() {
  const chosen = recipe.selectedOptions[0];
  element("description").textContent = chosen.dataset.description ?? "";
  if (!chosen.value) return;
  query.value = chosen.dataset.sql.trim();
  ask();
}

if (runs.length) {
  recipe.addEventListener("change", choose);
  element("ask").addEventListener("submit", (event) => { event.preventDefault(); ask(); });
  element("csv").addEventListener("click", save);
  query.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); ask(); }
  });
  query.addEventListener("input", () => { recipe.value = ""; element("description").textContent = ""; });
  document.querySelectorAll(".views .name").forEach((button) => button.addEventListener("click", () => {
    const name = button.dataset.name === "offset" || button.dataset.name === "index" ? `"${button.dataset.name}"` : button.dataset.name;
    query.setRangeText(name, query.selectionStart, query.selectionEnd, "end");
    query.focus();
  }));
  const asked = new URLSearchParams(location.search).get("recipe");
  if (asked) { recipe.value = asked; choose(); }
}

// A plot of the rows of a query: x, y, and one curve for each value of a third column.
import { chart, element, plain, style } from "./common.js";

const MOST_CURVES = 8;
const form = element("plot-choices");
const place = element("plot");
let answer = null;

export const isNumber = (type) => /^(u?int|float|double|decimal|halffloat)/.test(type);

function fill(select, names, usual) {
  const before = select.value;
  select.replaceChildren(...names.map((name) => new Option(name || "none", name)));
  select.value = names.includes(before) && before ? before : usual;
}

// The position of a column; of several with the same name, the first.
const columnOf = (name) => answer.columns.indexOf(name);

function curves() {
  const [x, y, split] = ["x", "y", "split"].map((name) => columnOf(form.elements[name].value));
  const keys = split < 0 ? [""] : [...new Set(answer.rows.map((row) => `${row[split]}`))];
  return keys.slice(0, MOST_CURVES).map((key) => {
    const rows = answer.rows.filter((row) => split < 0 || `${row[split]}` === key);
    if (isNumber(answer.types[x])) rows.sort((one, other) => one[x] - other[x]); // a line goes from left to right
    return { key, x: rows.map((row) => row[x]), y: rows.map((row) => row[y]) };
  });
}

function draw() {
  const kind = form.elements.kind.value;
  const found = curves();
  const isDiscrete = !isNumber(answer.types[columnOf(form.elements.x.value)]);
  chart(place, found.map(({ key, x, y }, number) => {
    const look = style(number);
    return {
      ...(kind === "bars" ? { type: "bar" } : { type: "scatter", mode: kind === "points" ? "markers" : x.length > 150 ? "lines" : "lines+markers" }),
      name: plain(key), x: x.map((value) => (isDiscrete && value !== null ? plain(typeof value === "object" ? JSON.stringify(value) : value) : value)), y,
      line: { color: look.color, dash: look.dash, width: 2 }, marker: { color: look.color, symbol: look.symbol, size: 7 },
    };
  }), {
    showlegend: found.length > 1, uirevision: `${form.elements.x.value} ${form.elements.y.value}`, barmode: "group",
    xaxis: { title: { text: plain(form.elements.x.value) }, ...(isDiscrete ? { type: "category" } : { type: "linear" }) }, yaxis: { title: { text: plain(form.elements.y.value) }, rangemode: kind === "bars" ? "tozero" : "normal" },
  });
}

// Offers to plot a result; null hides what was offered.
export function offerPlot(result) {
  answer = result;
  const section = element("plot-section");
  const numbers = (result?.columns ?? []).filter((_, column) => isNumber(result.types[column]));
  section.hidden = !numbers.length || !result.rows.length;
  if (section.hidden) return;
  const x = ["offset", "bucket", "first"].find((name) => numbers.includes(name)) ?? result.columns.find((name) => name !== "run") ?? "run";
  const values = (name) => new Set(result.rows.map((row) => row[columnOf(name)])).size;
  const split = result.columns.find((name) => name !== x && !numbers.includes(name) && values(name) > 1 && values(name) <= MOST_CURVES);
  fill(form.elements.x, result.columns, x);
  fill(form.elements.y, numbers, numbers.findLast((name) => name !== x) ?? numbers[0]);
  fill(form.elements.split, ["", ...result.columns], split ?? "");
  if (section.open) draw();
}

form.addEventListener("change", draw);
form.addEventListener("submit", (event) => event.preventDefault());
element("plot-section").addEventListener("toggle", (event) => { if (event.target.open && answer) draw(); });

// What each policy would give in every block: tokens per second and per target forward, with intervals.
import { chart, element, live, narrow, plain, question, runs, story, style, table, whole } from "./common.js";

const ORDER = ["as run", "nothing", "copies", "model"]; // from top to bottom
const SHORT = { "as run": "as run", nothing: "no draft", copies: "copies", model: "model" };
const RATES = [
  { key: "per_second", title: "tokens per second", digits: 1, x: "x", y: "y" },
  { key: "per_forward", title: "tokens per target forward", digits: 2, x: "x2", y: "y2" },
];

const words = (rate, digits) => (rate ? `${rate.value.toFixed(digits)} ± ${rate.half.toFixed(digits)}` : "–");

// One row of the chart per policy; the points of several runs are above one another.
function traces(policies) {
  return RATES.flatMap(({ key, title, digits, x, y }) => runs.map((run, number) => {
    const mine = policies.filter((row) => row.run === run && row[key]);
    const look = style(number);
    const shift = runs.length > 1 ? (number / (runs.length - 1) - 0.5) * 0.5 : 0;
    return {
      type: "scatter", mode: "markers", name: plain(run), legendgroup: run, showlegend: runs.length > 1 && x === "x", xaxis: x, yaxis: y, cliponaxis: false,
      x: mine.map((row) => row[key].value), y: mine.map((row) => ORDER.indexOf(row.action) + shift),
      marker: { color: look.color, size: 11, symbol: mine.map((row) => `${look.symbol}${row.is_vague ? "-open" : ""}`) },
      error_x: { type: "data", symmetric: false, array: mine.map((row) => row[key].high - row[key].value), arrayminus: mine.map((row) => row[key].value - row[key].low), color: `${look.color}88`, thickness: 3, width: 6 },
      hovertext: mine.map((row) => plain(`${row.name}: ${words(row[key], digits)} ${title}, from ${whole(row.blocks)} blocks`)), hoverinfo: "text",
    };
  }));
}

function draw(policies) {
  const place = element("chart");
  place.hidden = !policies.length;
  if (!policies.length) return;
  const tall = narrow();
  const side = { tickvals: ORDER.map((_, row) => row), ticktext: ORDER.map((action) => SHORT[action]), range: [ORDER.length - 0.4, -0.6], zeroline: false };
  chart(place, traces(policies), {
    hovermode: "closest", grid: { rows: tall ? 2 : 1, columns: tall ? 1 : 2, pattern: "independent", xgap: 0.14, ygap: 0.4 },
    xaxis: { title: { text: RATES[0].title }, rangemode: "tozero" }, xaxis2: { title: { text: RATES[1].title }, rangemode: "tozero" },
    yaxis: side, yaxis2: { ...side, anchor: "x2" },
  });
}

if (runs.length) live(async (again) => {
  const found = await question("policies", { again });
  if (!found) return;
  story(element("story"), found.story);
  draw(found.policies);
  const isFastest = (row) => row.per_second && found.policies.every((other) => other === row || other.run !== row.run || (other.per_second?.high ?? 0) < row.per_second.low);
  table(element("policies"), [
    { title: "policy", of: (row) => row.name }, { title: "tokens per second", of: (row) => `${words(row.per_second, 1)}${isFastest(row) ? " ▲" : ""}`, number: true },
    { title: "tokens per forward", of: (row) => words(row.per_forward, 2), number: true }, { title: "blocks", of: (row) => row.blocks, show: whole, number: true },
    ...(runs.length > 1 ? [{ title: "run", of: (row) => row.run }] : []),
  ], found.policies, "Policies, the fastest first");
});

// Reliability curves: the accepted share of tokens by the estimate that was made before, with counts per bin.
import { chart, colorOf, element, fixed, heading, interval, live, narrow, pattern, plain, question, runs, story, style, table, whole } from "./common.js";

const FEW = 30; // judged tokens, as in store/query/rates.py
const NAMES = { head: "acceptance head", lookup: "own text", memory: "memory", model: "model" };
const SOURCES = {
  head: { color: colorOf("blue"), symbol: "circle", dash: "solid", shape: "" },
  lookup: { color: colorOf("amber"), symbol: "square", dash: "dot", shape: "/" },
  memory: { color: colorOf("pink"), symbol: "diamond", dash: "dash", shape: "." },
};

// One curve per run and source; of one run the colour is that of the source, of several that of the run.
function curves(bins, sources) {
  return runs.flatMap((run, number) => sources.map((source) => ({
    run, source, rows: bins.filter((row) => row.run === run && row.source === source), color: runs.length > 1 ? style(number).color : SOURCES[source].color,
    name: [...(runs.length > 1 ? [run] : []), ...(sources.length > 1 ? [NAMES[source]] : [])].join(": ") || NAMES[source],
  }))).filter(({ rows }) => rows.length);
}

function traces({ source, rows, color, name }) {
  const look = SOURCES[source];
  const hover = rows.map((row) => plain(`${name}: estimate ${row.start.toFixed(1)} to ${row.end.toFixed(1)}, ${row.mean.toFixed(3)} on average; ` +
    `${row.acceptance.toFixed(3)} accepted (${row.low.toFixed(2)} to ${row.high.toFixed(2)}) of ${whole(row.judged)}`));
  const shared = { name: plain(name), legendgroup: name, hovertext: hover, hoverinfo: "text" };
  return [
    { ...shared, type: "scatter", mode: "lines+markers", x: rows.map((row) => row.mean), y: rows.map((row) => row.acceptance), line: { color, dash: look.dash, width: 2 },
      marker: { color, size: 9, symbol: rows.map((row) => `${look.symbol}${row.judged < FEW ? "-open" : ""}`) },
      error_y: { type: "data", symmetric: false, array: rows.map((row) => row.high - row.acceptance), arrayminus: rows.map((row) => row.acceptance - row.low), color: `${color}88`, thickness: 2, width: 4 } },
    { ...shared, type: "bar", yaxis: "y2", showlegend: false, x: rows.map((row) => (row.start + row.end) / 2), y: rows.map((row) => row.judged), marker: { color, pattern: pattern(look.shape) } },
  ];
}

function draw(place, bins, sources, axis) {
  const shown = curves(bins, sources);
  const ideal = { type: "scatter", mode: "lines", x: [0, 1], y: [0, 1], line: { color: colorOf("grey"), dash: "dash", width: 1.5 }, hoverinfo: "skip", showlegend: false };
  chart(place, [ideal, ...shown.flatMap(traces)], {
    hovermode: "closest", barmode: "group", showlegend: shown.length > 1, bargap: 0.1, margin: { l: narrow() ? 44 : 62, r: 12, t: 36, b: 46 },
    annotations: [heading("<b>Accepted share</b>; dashed: perfect", 1), heading("<b>Tokens</b> per bin", 0.22)], legend: { orientation: "v", x: 0.02, xanchor: "left", y: 0.98, yanchor: "top", bgcolor: "rgba(0,0,0,0)" },
    xaxis: { title: { text: axis }, range: [-0.02, 1.02], dtick: 0.2, anchor: "y2", zeroline: false },
    yaxis: { domain: [0.33, 1], range: [-0.02, 1.05], dtick: 0.2, zeroline: false }, yaxis2: { domain: [0, 0.22], rangemode: "tozero", nticks: 3 },
  });
}

if (runs.length) live(async (again) => {
  const found = await question("calibration", { again });
  if (!found) return;
  story(element("story"), found.story);
  draw(element("head"), found.bins, ["head"], "estimate of the head");
  draw(element("copies"), found.bins, ["lookup", "memory"], "estimated chance");
  table(element("bins"), [
    { title: "estimate of", of: (row) => NAMES[row.source] ?? row.source }, { title: "bin", of: (row) => `${row.start.toFixed(1)} to ${row.end.toFixed(1)}`, short: true },
    { title: "tokens", of: (row) => row.judged, show: whole, number: true }, { title: "mean estimate", of: (row) => row.mean, show: fixed(3), number: true },
    { title: "accepted", of: interval, number: true }, { title: "too sure by", of: (row) => row.mean - row.acceptance, show: fixed(3), number: true }, { title: "run", of: (row) => row.run },
  ], found.bins, "Bins of the estimates");
});

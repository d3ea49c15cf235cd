// The n-gram cache: entries, changes, hits, and the entries that pay.
import { cards, chart, element, fixed, heading, later, live, make, narrow, pattern, percent, plain, question, room, runs, story, style, table, whole } from "./common.js";

const PANELS = [
  ["<b>Entries</b> at each version", [0.79, 1]], [narrow() ? "<b>Inserted</b> (up), <b>evicted</b> (down)" : "<b>Changes</b> since the version before: inserted (up), evicted (down, striped)", [0.53, 0.72]],
  ["<b>Hits</b>: proposed (dotted), accepted (solid)", [0.265, 0.46]], [`<b>Share</b> of ${narrow() ? "" : "all "}accepted tokens ${narrow() ? "by" : "that came by"} n-grams`, [0, 0.195]],
];

// One curve per run and target that has versions.
function caches(sizes) {
  const keys = [...new Set(sizes.map((row) => JSON.stringify([row.run, row.target])))].map((key) => JSON.parse(key));
  keys.sort(([one], [other]) => runs.indexOf(one) - runs.indexOf(other));
  const several = new Set(keys.map(([run]) => run)).size < keys.length;
  return keys.map(([run, target]) => ({ run, target, name: several ? `${run}: ${target}` : run, rows: sizes.filter((row) => row.run === run && row.target === target) }));
}

function sizeTraces(found) {
  return caches(found.sizes).flatMap(({ rows, name }, number) => {
    const look = style(number);
    const shared = { x: rows.map((row) => row.offset), legendgroup: name, customdata: rows.map((row) => row.version) };
    return [
      { ...shared, type: "scatter", mode: "lines+markers", name: plain(name), y: rows.map((row) => row.entries), line: { shape: "hv", color: look.color, dash: look.dash, width: 2 },
        marker: { symbol: look.symbol, size: rows.length > 40 ? 4 : 8 }, showlegend: runs.length > 1 || number > 0, hovertemplate: "%{y:,d} entries at version %{customdata}<extra></extra>" },
      { ...shared, type: "bar", name: "inserted", y: rows.map((row) => row.inserted), yaxis: "y2", marker: { color: look.color }, showlegend: false,
        hovertemplate: "%{y:,d} inserted since the version before (version %{customdata})<extra></extra>" },
      { ...shared, type: "bar", name: "evicted", y: rows.map((row) => (row.evicted === null ? null : -row.evicted)), yaxis: "y2",
        marker: { color: look.color, pattern: pattern("/") }, showlegend: false, hovertemplate: "%{y:,d}: evicted since the version before (version %{customdata})<extra></extra>" },
    ];
  });
}

function hitTraces(hits) {
  return runs.flatMap((run, number) => {
    const rows = hits.run.flatMap((name, row) => (name === run ? [row] : []));
    const look = style(number);
    const of = (key) => rows.map((row) => hits[key][row]);
    const x = rows.map((row) => (hits.first[row] + hits.last[row]) / 2);
    const line = (key, axis, words, more) => ({
      type: "scatter", mode: rows.length > 150 ? "lines" : "lines+markers", x, y: of(key), yaxis: axis, legendgroup: run, showlegend: false, connectgaps: false,
      line: { color: look.color, width: 2, ...more.line }, marker: { size: 5, symbol: more.symbol }, customdata: rows.map((row) => [hits.first[row], hits.last[row]]),
      hovertemplate: `%{y:${more.show}} ${words} (prompts %{customdata[0]:,d} to %{customdata[1]:,d})<extra>${plain(run)}</extra>`,
    });
    return [
      line("accepted", "y3", "hits accepted", { show: ",d", line: { dash: "solid" }, symbol: "circle" }),
      line("proposed", "y3", "hits proposed", { show: ",d", line: { dash: "dot" }, symbol: "circle-open" }),
      line("share", "y4", "of all accepted tokens came by n-grams", { show: ".1%", line: { dash: look.dash }, symbol: look.symbol }),
    ];
  });
}

function draw(found) {
  const x = { title: { text: "prompt (offset in the stream)" }, range: room([0, ...found.hits.last, ...found.sizes.map((row) => row.offset)]), tickformat: ",d", anchor: "y4", zeroline: false };
  const wide = Math.max(1, ...found.sizes.map((row) => row.offset));
  const traces = [...sizeTraces(found), ...hitTraces(found.hits)].map((trace) => (trace.type === "bar" ? { ...trace, width: wide / 120 } : trace));
  chart(element("chart"), traces, {
    xaxis: x, barmode: "relative", hovermode: "closest",
    annotations: PANELS.map(([text, domain]) => heading(text, domain[1])),
    yaxis: { domain: PANELS[0][1], rangemode: "tozero" }, yaxis2: { domain: PANELS[1][1] },
    yaxis3: { domain: PANELS[2][1], rangemode: "tozero" }, yaxis4: { domain: PANELS[3][1], rangemode: "tozero", tickformat: ".2~%" },
  });
}

function showTotals(found) {
  cards(element("totals"), runs.map((run, number) => {
    const mine = caches(found.sizes).filter((cache) => cache.run === run);
    const sizes = mine.flatMap((cache) => cache.rows);
    const sum = (values) => (values.length ? values.reduce((total, value) => total + (value ?? 0), 0) : null);
    const rows = found.hits.run.flatMap((name, row) => (name === run ? [row] : []));
    const total = (key) => rows.reduce((sum, row) => sum + found.hits[key][row], 0);
    return { name: run, color: style(number).color, metrics: [
      ["entries at the last version", whole(sum(mine.map((cache) => cache.rows.at(-1).entries))), mine.length > 1 ? `${mine.length} targets` : ""],
      ["inserted", whole(sum(sizes.map((row) => row.inserted)))],
      ["evicted", whole(sum(sizes.map((row) => row.evicted)))],
      ["hits proposed", whole(total("proposed")), `${whole(total("judged"))} judged`],
      ["hits accepted", whole(total("accepted"))],
      ["acceptance of hits", percent(total("judged") ? total("accepted") / total("judged") : null)],
    ] };
  }));
}

// The spelling of each piece, with its id where the pointer is.
const piecesOf = ({ pieces, spelt }) => make("span", { className: "pieces" }, ...spelt.map((text, place) => make("code", { text, title: `piece ${pieces[place]}` })));

function showTables(found) {
  const run = runs.length > 1 ? [{ title: "run", of: (row) => row.run }] : [];
  table(element("sizes"), [
    { title: "run", of: (row) => row.run }, { title: "target", of: (row) => row.target }, { title: "version", of: (row) => row.version, number: true },
    { title: "prompt", of: (row) => row.offset, show: whole, number: true }, { title: "entries", of: (row) => row.entries, show: whole, number: true },
    { title: "inserted", of: (row) => row.inserted, show: whole, number: true }, { title: "evicted", of: (row) => row.evicted, show: whole, number: true },
  ], found.sizes, "Entries of the cache at each version");
  table(element("paying"), [
    ...run, { title: "token", of: (row) => row.token === null ? `#${row.proposed_id}` : row.token, show: JSON.stringify, code: true }, { title: "pieces", of: piecesOf, by: (row) => row.spelt.join(" ") },
    { title: "accepted", of: (row) => row.accepted, show: whole, number: true }, { title: "of judged", of: (row) => row.acceptance_rate, show: percent, number: true },
    { title: "pieces carried", of: (row) => row.accepted_pieces, show: whole, number: true },
  ], found.paying, "N-grams that carried the most pieces");
  table(element("lengths-table"), [
    ...run, { title: "pieces", of: (row) => row.pieces, number: true }, { title: "judged", of: (row) => row.judged, show: whole, number: true },
    { title: "accepted", of: (row) => row.acceptance_rate, show: percent, number: true },
    { title: "target, first piece", of: (row) => row.mean_first_level_target, show: fixed(3), number: true },
    { title: "drafter, first piece", of: (row) => row.mean_first_level_drafter, show: fixed(3), number: true },
  ], found.lengths, "Acceptance by number of pieces");
  const shapes = ["", "/", "x", ".", "-", "|", "+", "\\"]; // with the colours: one for each of eight runs
  const bars = runs.map((name, number) => {
    const rows = found.lengths.filter((row) => row.run === name);
    return { type: "bar", name: plain(name), x: rows.map((row) => row.pieces), y: rows.map((row) => row.acceptance_rate), customdata: rows.map((row) => row.judged),
      marker: { color: style(number).color, pattern: pattern(shapes[number]) }, hovertemplate: "%{y:.1%} of %{customdata:,d} judged<extra></extra>" };
  });
  chart(element("lengths"), bars, {
    showlegend: runs.length > 1, margin: { l: 60, r: 10, t: 26, b: 44 },
    xaxis: { title: { text: "drafter pieces per target token (1: direct)" }, dtick: 1 }, yaxis: { title: { text: "acceptance" }, range: [0, 1] },
  });
}

async function showHeld(again) {
  const found = await question("ngrams/held", { parameters: { search: element("choices").elements.search.value }, again });
  if (!found) return;
  const held = found.held.map((row) => `${whole(row.entries)} in version ${runs.length > 1 ? `${row.run}/` : ""}${row.version}`).join(", ");
  element("held-shown").textContent = held ? `${held}; ${found.total > found.entries.length ? `the ${whole(found.entries.length)} most used of ` : ""}${whole(found.total)} found` : "No published version with a cache is in the run's folder.";
  table(element("held"), [
    ...(runs.length > 1 ? [{ title: "run", of: (row) => row.run }] : []), { title: "token", of: (row) => `“${row.token}”`, code: true }, { title: "pieces", of: piecesOf, by: (row) => row.spelt.join(" ") },
    { title: "uses", of: (row) => row.uses, show: whole, number: true }, { title: "hits judged", of: (row) => row.judged, show: whole, number: true },
    { title: "hits accepted", of: (row) => row.accepted, show: whole, number: true }, { title: "target", of: (row) => row.target },
  ], found.entries, "Entries of the cache, the most used first");
}

if (runs.length) {
  const list = live(showHeld);
  element("choices").addEventListener("submit", (event) => event.preventDefault());
  element("choices").addEventListener("input", later(list.now));
}

if (runs.length) live(async (again) => {
  const found = await question("ngrams", { again });
  if (!found) return;
  element("window").textContent = `Hits are counted over ${whole(found.window)} prompts per point.`;
  story(element("story"), found.story);
  showTotals(found);
  draw(found);
  showTables(found);
});

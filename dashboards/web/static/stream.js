// Acceptance, block efficiency and speed along the stream, with drifts, recalls, versions and updates.
import { cards, chart, colorOf, element, fixed, heading, interval, live, make, narrow, percent, plain, question, room, runs, story, style, table, whole } from "./common.js";

const PANELS = [
  { key: "acceptance", axis: "y", title: narrow() ? "<b>Acceptance</b>; held-out tokens predicted ╌" :
    "<b>Acceptance</b> of the drafter model's drafts; dashed: tokens of held-out prompts that it predicts, dotted: as loaded", show: ".3f", domain: [0.75, 1] },
  { key: "efficiency", axis: "y2", title: `<b>Block efficiency</b> (tokens per ${narrow() ? "" : "target "}forward)`, show: ".2f", domain: [0.57, 0.7] },
  { key: "speed", axis: "y3", title: "<b>Speed</b> (tokens per second)", show: ".0f", domain: [0.2, 0.33] },
];
const SOURCES_TITLE = narrow() ? "<b>By source</b>: model ─, own ···, memory ╌" :
  "<b>Accepted tokens per target forward</b> by source: model (solid), own text (dotted), memory (dashed)";
const SOURCES_DOMAIN = [0.38, 0.52];
// Sources of drafts, distinguished by dash and marker; of a single run also by colour.
const SOURCES = {
  model: { name: "model", color: colorOf("blue"), dash: "solid", symbol: "circle" },
  lookup: { name: "own text", color: colorOf("amber"), dash: "dot", symbol: "square" },
  memory: { name: "memory", color: colorOf("pink"), dash: "dash", symbol: "diamond" },
};
// Kinds of marks from top to bottom, each with a place, a shape and a colour of its own.
const KINDS = {
  drift: { symbol: "triangle-down", glyph: "▼", size: 13, line: 2, color: colorOf("red"), of: "drifts" },
  "head reset": { symbol: "cross", glyph: "✚", size: 11, line: 1, color: colorOf("pink"), of: "resets" },
  recall: { symbol: "star", glyph: "★", size: 12, line: 1, color: colorOf("amber"), of: "recalls" },
  version: { symbol: "diamond", glyph: "◆", size: 10, line: 1, color: colorOf("blue"), of: "versions" },
  update: { symbol: "line-ns-open", glyph: "|", size: 9, line: 1.5, color: colorOf("green"), of: "updates" },
};
const FEW = 30; // judged tokens, as in store/query/rates.py; points over fewer are hollow
const MOST_LINES = 40;
const MOST_LISTED = 300;
const ACTED = ["reset", "recall"];
const form = element("choices");
const settings = () => Object.fromEntries(new FormData(form));

// Positions of the rows of each curve, by run and part.
function groups(curves) {
  const found = new Map();
  curves.run.forEach((run, row) => {
    const key = JSON.stringify([run, curves.part[row]]);
    if (!found.has(key)) found.set(key, { run, part: curves.part[row], rows: [] });
    found.get(key).rows.push(row);
  });
  const place = ({ run, rows }) => [runs.indexOf(run), curves.first[rows[0]]];
  return [...found.values()].sort((one, other) => place(one)[0] - place(other)[0] || place(one)[1] - place(other)[1]);
}

// The interval of each rate as a bar in a pale colour, wide where little was judged; hollow points over few tokens.
function certainty(curves, rows, look) {
  const distance = (end, sign) => rows.map((row) => (curves.acceptance[row] === null ? 0 : sign * (curves[end][row] - curves.acceptance[row])));
  return {
    mode: "lines+markers",
    marker: { size: rows.length > 150 ? 4 : 6, symbol: rows.map((row) => `${look.symbol}${curves.judged[row] < FEW ? "-open" : ""}`) },
    error_y: { type: "data", symmetric: false, array: distance("high", 1), arrayminus: distance("low", -1), width: 0, thickness: rows.length > 150 ? 2 : 7, color: `${look.color}44` },
    hovertemplate: "%{y:.3f}, interval %{customdata[3]:.2f} to %{customdata[4]:.2f} over %{customdata[2]:,d} judged tokens (prompts %{customdata[0]:,d} to %{customdata[1]:,d})<extra></extra>",
  };
}

// A thin dotted line over the gaps of a curve of acceptance, in which nothing was judged; none if there are none.
function bridge(curves, rows, look) {
  const known = rows.filter((row) => curves.acceptance[row] !== null);
  const gaps = known.slice(1).flatMap((row, place) => (rows.indexOf(row) - rows.indexOf(known[place]) > 1 ? [known[place], row, null] : []));
  if (!gaps.length) return [];
  return [{
    type: "scatter", mode: "lines", yaxis: "y", showlegend: false, hoverinfo: "skip", line: { color: look.color, dash: "1px,4px", width: 1.5 },
    x: gaps.map((row) => row && (curves.first[row] + curves.last[row]) / 2), y: gaps.map((row) => row && curves.acceptance[row]),
  }];
}

function curveTraces(curves, panels, named) {
  const found = groups(curves);
  const parts = [...new Set(found.map((group) => group.part))];
  return found.flatMap((group) => {
    const run = style(runs.indexOf(group.run));
    const look = named ? { ...style(parts.indexOf(group.part)), color: run.color } : run; // a colour is a run, on all pages
    const name = plain(group.part ? (runs.length > 1 ? `${group.run}: ${group.part}` : group.part) : group.run);
    return [...(panels[0].key === "acceptance" ? bridge(curves, group.rows, look) : []), ...panels.map((panel) => ({
      type: "scatter", mode: group.rows.length > 150 ? "lines" : "lines+markers", yaxis: panel.axis, name, legendgroup: name,
      showlegend: panel.key === "acceptance" && (named || runs.length > 1),
      x: group.rows.map((row) => (curves.first[row] + curves.last[row]) / 2), y: group.rows.map((row) => curves[panel.key][row]),
      customdata: group.rows.map((row) => [curves.first[row], curves.last[row], curves.judged[row], curves.low[row], curves.high[row]]), connectgaps: false,
      line: { color: look.color, dash: look.dash, width: 2 }, marker: { symbol: look.symbol, size: 5 },
      hovertemplate: `%{y:${panel.show}} (prompts %{customdata[0]:,d} to %{customdata[1]:,d})<extra>${name}</extra>`,
      ...(panel.key === "acceptance" ? certainty(curves, group.rows, look) : {}),
    }))];
  });
}

function sourceTraces(sources) {
  return runs.flatMap((run, number) => {
    const rows = sources.run.flatMap((name, row) => (name === run ? [row] : []));
    return Object.entries(SOURCES).map(([key, look]) => ({
      type: "scatter", mode: rows.length > 150 ? "lines" : "lines+markers", yaxis: "y5", name: look.name, legendgroup: run, showlegend: false,
      x: rows.map((row) => (sources.first[row] + sources.last[row]) / 2), y: rows.map((row) => sources[key][row]),
      customdata: rows.map((row) => [sources.first[row], sources.last[row]]),
      line: { color: runs.length > 1 ? style(number).color : look.color, dash: look.dash, width: 2 }, marker: { symbol: look.symbol, size: 5 },
      hovertemplate: `%{y:.2f} from ${look.name} (prompts %{customdata[0]:,d} to %{customdata[1]:,d})<extra>${plain(run)}</extra>`,
    }));
  });
}

// What the drafter predicts of the tokens of held-out prompts after each update, and would as it was loaded.
function learnedTraces(updates) {
  const KINDS_OF_SHARE = [["predicted", "dash", "now"], ["predicted_loaded", "dot", "as loaded"]];
  return runs.flatMap((run, number) => {
    const mine = updates.filter((mark) => mark.run === run && mark.predicted !== null);
    return (mine.length ? KINDS_OF_SHARE : []).map(([key, dash, words]) => ({
      type: "scatter", mode: "lines+markers", yaxis: "y", legendgroup: run, showlegend: false, x: mine.map((mark) => mark.last), y: mine.map((mark) => mark[key]),
      line: { color: runs.length > 1 ? style(number).color : colorOf("green"), dash, width: 2 }, marker: { size: 4 },
      hovertemplate: `%{y:.3f} of the tokens of held-out prompts, ${words} (update after prompt %{x:,d})<extra>${plain(run)}</extra>`,
    }));
  });
}

const rate = fixed(3);
const WORDS = {
  drift: (mark) => mark.description,
  "head reset": (mark) => `acceptance head reset at ${whole(mark.offset)}, in response to the drift; its labels were dropped` +
    `${mark.restored === null ? "" : `; then the head of version ${mark.restored} was restored`}`,
  recall: (mark) => `${mark.version === null ? "current drafter kept" : `version ${mark.version} restored`} at ${whole(mark.offset)}: best of ` +
    `${mark.candidates} earlier ones ${rate(mark.acceptance_best)}, current ${rate(mark.acceptance_present)}`,
  version: (mark) => `version ${mark.version} at ${whole(mark.offset)} (${mark.reason}), parent ${mark.parent ?? "none"}, ${whole(mark.cache_entries)} n-grams, ` +
    `acceptance since the previous one ${rate(mark.acceptance)}`,
  update: (mark) => `${whole(mark.steps)} update${mark.steps > 1 ? "s" : ""} at ${whole(mark.offset)}${mark.last > mark.offset ? ` to ${whole(mark.last)}` : ""}: ` +
    `${mark.served ? "served" : "refused by the gate"}, ${fixed(1)(mark.seconds)} s, drafter ${mark.drafter_version}` +
    `${mark.predicted === null ? "" : `, predicts ${percent(mark.predicted)} of held-out tokens`}`,
};

// A response to a drift begins with a reset of the head, which has no row of its own in the log.
function withResets(marks) {
  const restored = (drift) => marks.recalls.find((mark) => mark.run === drift.run && mark.target === drift.target && mark.offset === drift.offset)?.version ?? null;
  const acted = marks.drifts.filter((mark) => ACTED.includes(mark.action));
  return { ...marks, resets: acted.map((mark) => ({ ...mark, restored: restored(mark) })) };
}

function markTraces(marks) {
  const kinds = Object.keys(KINDS).reverse();
  return kinds.flatMap((kind, height) => runs.map((run, number) => {
    const { of, symbol, size, line, color } = KINDS[kind];
    const mine = marks[of].filter((mark) => mark.run === run);
    const filled = (mark) => (kind === "drift" ? ACTED.includes(mark.action) : kind === "recall" ? mark.version !== null : kind === "update" ? mark.served : true);
    const open = symbol.endsWith("-open") ? "x-thin-open" : `${symbol}-open`;
    const end = Math.max(...marks.versions.map((mark) => mark.offset)) * 0.9; // numbers near the right edge stand on the left
    const words = (mark) => `${runs.length > 1 ? `${run}: ` : ""}${WORDS[kind](mark)}`;
    return {
      type: "scatter", mode: kind === "version" && mine.length < 40 ? "markers+text" : "markers", yaxis: "y4", cliponaxis: false, showlegend: false, legendgroup: run,
      x: mine.map((mark) => mark.offset), y: mine.map(() => height + (runs.length > 1 ? (0.5 - number / (runs.length - 1)) * 0.5 : 0)),
      text: mine.map((mark) => (kind === "version" ? ` ${mark.version} ` : "")), textposition: mine.map((mark) => (mark.offset > end ? "middle left" : "middle right")), textfont: { size: 11 },
      hovertext: mine.map((mark) => plain(words(mark))), hoverinfo: "text",
      marker: { color, size: mine.length > 60 ? 6 : size, opacity: mine.length > 60 ? 0.6 : 1, line: { width: line, color }, symbol: mine.map((mark) => (filled(mark) ? symbol : open)) },
    };
  }));
}

// Datasets of the first run if they do not overlap, and a line through all panels at each drift with a response.
function backdrop(found) {
  const mine = found.datasets.filter((dataset) => dataset.run === runs[0]);
  const apart = mine.every((dataset, number) => !number || dataset.first > mine[number - 1].last);
  const bands = apart && mine.length < 30 ? mine : [];
  const shapes = bands.map((band, number) => ({
    type: "rect", xref: "x", yref: "paper", x0: band.first - 0.5, x1: band.last + 0.5, y0: 0.16, y1: 1, layer: "below", line: { width: 0 },
    fillcolor: colorOf(number % 2 ? "head" : "paper"),
  }));
  const annotations = bands.map((band) => ({
    x: band.first, y: PANELS[0].domain[0], xref: "x", yref: "paper", text: plain(band.dataset), showarrow: false, xanchor: "left", yanchor: "bottom", font: { size: 12, color: colorOf("soft") },
  }));
  const all = found.marks.drifts.filter((mark) => ACTED.includes(mark.action));
  const acted = all.length > MOST_LINES ? [] : all; // more would hide the curves
  const lines = acted.map((mark) => ({
    type: "line", xref: "x", yref: "paper", x0: mark.offset, x1: mark.offset, y0: 0, y1: 1, line: { color: KINDS.drift.color, width: 1.3, dash: "dash" },
  }));
  return { shapes: [...shapes, ...lines], annotations };
}

function draw(found, split) {
  const byPart = split !== "none";
  const traces = [
    ...curveTraces(found.parts, PANELS.slice(0, 2), byPart),
    ...curveTraces(found.whole, PANELS.slice(2), false),
    ...sourceTraces(found.sources),
    ...learnedTraces(found.marks.updates),
    ...markTraces(found.marks),
  ];
  const kinds = Object.keys(KINDS).reverse();
  const { shapes, annotations } = backdrop(found);
  chart(element("chart"), traces, {
    shapes, annotations: [...annotations, ...PANELS.map((panel) => heading(panel.title, panel.domain[1])), heading(SOURCES_TITLE, SOURCES_DOMAIN[1])], hovermode: "closest",
    xaxis: { title: { text: "prompt (offset in the stream)" }, anchor: "y4", range: room([0, ...found.whole.last]), tickformat: ",d", zeroline: false },
    yaxis: { domain: PANELS[0].domain, range: [0, 1] },
    yaxis2: { domain: PANELS[1].domain, range: [1, Math.max(2, ...found.parts.efficiency) * 1.05] },
    yaxis3: { domain: PANELS[2].domain, rangemode: "tozero" },
    yaxis5: { domain: SOURCES_DOMAIN, rangemode: "tozero" },
    yaxis4: { domain: [0, 0.15], range: [-0.6, 4.6], tickvals: kinds.map((_, height) => height), ticktext: kinds, fixedrange: true, zeroline: false },
  });
}

function showTotals(found) {
  cards(element("totals"), runs.map((run, number) => {
    const total = found.totals.find((row) => row.run === run) ?? {};
    const learning = found.story.find((row) => row.run === run)?.learning ?? {};
    const drifts = found.answered.find((row) => row.run === run) ?? { detected: 0, answered: 0 };
    return { name: run, color: style(number).color, metrics: [
      ["prompts", whole(total.prompts ?? 0), total.targets?.length > 1 ? `${total.targets.length} targets` : ""],
      ["tokens", whole(total.tokens ?? 0)],
      ["acceptance", rate(total.acceptance), total.judged ? `${fixed(2)(total.low)} to ${fixed(2)(total.high)} of ${whole(total.judged)}` : "nothing judged"],
      ["tokens / forward", fixed(2)(total.efficiency), `${percent(total.copied_share)} with a copied draft`],
      ["tokens / second", fixed(1)(total.speed)],
      ["seconds / answer", fixed(2)(total.median_seconds), `99% within ${fixed(2)(total.p99_seconds)}; newest ${whole(total.newest ?? 0)}`],
      ["drift responses", whole(drifts.answered), `${whole(drifts.detected)} detected`],
      ["drafter updates", whole(learning.updates ?? 0), learning.heads ? `${whole(learning.heads)} of the head` : learning.updates ? "none of the head" : "did not learn"],
      ["tokens gained", whole(Math.round(learning.tokens_gained ?? 0))],
    ] };
  }));
}

function kindOf({ kind }) {
  const glyph = make("span", { text: `${KINDS[kind].glyph} `, "aria-hidden": "true" });
  glyph.style.color = KINDS[kind].color;
  return make("span", {}, glyph, kind);
}

// A link to the text of a prompt.
function textOf({ run, offset }) {
  return make("a", { href: `/text?${new URLSearchParams({ run, offset })}`, text: whole(offset) });
}

function showTables(found) {
  const happened = Object.keys(KINDS).filter((kind) => kind !== "update").flatMap((kind) => found.marks[KINDS[kind].of].map((mark) => ({ kind, ...mark })));
  happened.sort((one, other) => other.offset - one.offset);
  const total = found.marks.resets.length + ["drifts", "recalls", "versions"].reduce((sum, kind) => sum + (found.marks[kind][0]?.total ?? 0), 0);
  const listed = happened.slice(0, MOST_LISTED);
  element("shown").textContent = total > listed.length ? `${whole(listed.length)} of ${whole(total)} are listed, the newest first; the SQL page has all.` : "";
  table(element("events"), [
    { title: "prompt", of: textOf, by: (row) => row.offset, number: true }, { title: "what", of: kindOf, by: (row) => row.kind, short: true }, { title: "description", of: (row) => WORDS[row.kind](row) },
    ...(new Set(listed.map((row) => row.target)).size > 1 ? [{ title: "target", of: (row) => row.target }] : []), ...(runs.length > 1 ? [{ title: "run", of: (row) => row.run }] : []),
  ], listed, "Drifts, recalls and versions, the newest first");
  const curves = found.parts;
  const sourceRow = (row) => found.sources.run.findIndex((run, other) => run === curves.run[row] && Math.floor(found.sources.first[other] / found.window) === Math.floor(curves.first[row] / found.window));
  const bySource = (key) => (row) => (settings().split === "none" ? found.sources[key][sourceRow(row)] : null);
  table(element("curve-values"), [
    { title: "run", of: (row) => curves.run[row] }, { title: "part", of: (row) => curves.part[row] },
    { title: "prompts", of: (row) => `${whole(curves.first[row])}–${whole(curves.last[row])}` },
    { title: "acceptance", of: (row) => interval({ acceptance: curves.acceptance[row], low: curves.low[row], high: curves.high[row], judged: curves.judged[row] }), number: true },
    { title: "tokens per forward", of: (row) => curves.efficiency[row], show: fixed(2), number: true },
    ...Object.entries(SOURCES).map(([key, look]) => ({ title: `accepted, ${look.name}`, of: bySource(key), show: fixed(2), number: true })),
    { title: "tokens per second", of: (row) => (settings().split === "none" ? curves.speed[row] : null), show: fixed(1), number: true },
  ], curves.run.map((_, row) => row), "The curves as values");
}

if (runs.length) {
  const { now } = live(async (again) => {
    const chosen = settings();
    const found = await question("stream", { parameters: chosen, again });
    if (!found) return;
    element("window").textContent = `${whole(found.window)} prompts per point${chosen.split === "none" ? "" : "; tokens per second are of the whole run"}`;
    found.marks = withResets(found.marks);
    story(element("story"), found.story, found.compared, true);
    showTotals(found);
    draw(found, chosen.split);
    showTables(found);
  });
  form.addEventListener("change", now);
}

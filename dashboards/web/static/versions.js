// Published versions: lineage, acceptance while each was the latest, and a comparison of two.
import { chart, element, fixed, live, make, pattern, plain, question, room, runs, signed, style, swatch, table, whole } from "./common.js";

const SHAPES = { floor: "square", interval: "circle", drift: "triangle-down", end: "diamond" };
const MOST_NUMBERS = 60;
const form = element("pair");
let found = null;

const key = (version) => JSON.stringify([version.run, version.version]);
const name = (version) => `${runs.length > 1 ? `${version.run}: ` : ""}version ${version.version}`;
const ratio = (over, under) => (under ? over / under : null);

// The drift before which a version was published. If prompts end out of order, its offset may be the smaller one.
function causeOf(version, drifts) {
  if (version.reason !== "drift") return undefined;
  const distance = (drift) => Math.abs(drift.offset - version.offset - 1);
  return drifts.reduce((near, drift) => (near && distance(near) <= distance(drift) ? near : drift), undefined);
}

// The last drift between the parent of a version and the version. A version with the reason "drift" holds the weights
// that were in service before the response to that drift, so the next version contains the response.
function answeredBy(version, parent, drifts) {
  if (!parent) return null;
  const [before, own] = [causeOf(parent, drifts), causeOf(version, drifts)];
  return drifts.findLast((drift) => drift === before || (drift !== own && parent.offset < drift.offset && drift.offset <= version.offset)) ?? null;
}

// All data of each version in one row.
function joined({ versions, served, learned, drifts }) {
  const sorted = versions.sort((one, other) => runs.indexOf(one.run) - runs.indexOf(other.run) || one.version - other.version);
  return sorted.map((version) => {
    const same = (row) => row.run === version.run && row.version === version.version;
    const mine = served.filter(same);
    const total = (column) => mine.reduce((sum, row) => sum + row[column], 0);
    const steps = learned.find(same) ?? {};
    const parent = sorted.find((other) => other.run === version.run && other.version === version.parent);
    const answered = answeredBy(version, parent, drifts.filter((drift) => drift.run === version.run && drift.target === version.target));
    return { ...version, datasets: mine, prompts: total("prompts"), judged: total("judged"), acceptance: ratio(total("accepted"), total("judged")),
      efficiency: ratio(total("emitted"), total("blocks")), steps: steps.steps ?? 0, gained: steps.tokens_gained ?? null, seconds: steps.seconds ?? null, drift: answered };
  });
}

const height = (version) => version.acceptance ?? version.acceptance_before;

function draw(versions, recalls) {
  const lines = [...new Set(versions.map((version) => JSON.stringify([version.run, version.target])))].map((line) => JSON.parse(line));
  const several = new Set(lines.map(([run]) => run)).size < lines.length;
  const traces = lines.map(([run, target], number) => {
    const mine = versions.filter((version) => version.run === run && version.target === target);
    const parents = new Map(mine.map((version) => [version.version, version]));
    const look = style(number);
    const steps = mine.flatMap((version) => (parents.has(version.parent) ? [parents.get(version.parent), version, null] : []));
    const label = plain(several ? `${run}: ${target}` : run);
    return [
      { type: "scatter", mode: "lines", x: steps.map((version) => version && version.offset), y: steps.map((version) => version && height(version)), hoverinfo: "skip",
        line: { color: look.color, dash: look.dash, width: 2 }, legendgroup: label, showlegend: false },
      { type: "scatter", mode: mine.length > MOST_NUMBERS ? "markers" : "markers+text", cliponaxis: false, name: label, legendgroup: label,
        showlegend: lines.length > 1, x: mine.map((version) => version.offset), y: mine.map(height),
        text: mine.map((version) => `${version.version}`), textposition: "top center",
        marker: { color: look.color, size: mine.length > MOST_NUMBERS ? 5 : 11, symbol: mine.map((version) => SHAPES[version.reason] ?? "circle") },
        hovertext: mine.map((version) => plain(`${name(version)} (${version.reason}), published at prompt ${whole(version.offset)}\nacceptance while the latest ${fixed(3)(version.acceptance)} ` +
          `over ${whole(version.prompts)} prompts\nparent ${version.parent ?? "none"}, ${whole(version.cache_entries)} n-grams`).replaceAll("\n", "<br>")), hoverinfo: "text" },
    ];
  }).flat();
  const marks = recalls.filter((recall) => recall.version !== null).map((recall) => ({
    x: recall.offset, y: recall.acceptance_best, text: `version ${recall.version} restored`, showarrow: true, arrowhead: 2, ax: 0, ay: -34, font: { size: 12 },
  }));
  chart(element("chart"), traces, {
    annotations: marks, hovermode: "closest",
    xaxis: { title: { text: "published at prompt" }, range: room(versions.length ? versions.map((version) => version.offset) : [0]), tickformat: ",d", zeroline: false },
    yaxis: { title: { text: "acceptance while the latest" }, range: [0, Math.min(1.05, 0.15 + Math.max(0.35, ...versions.map((version) => height(version) ?? 0)))] },
  });
}

const lastMeasured = (versions) => versions.findLast((version) => version.judged) ?? versions.at(-1);

function lastOfTwoRuns(versions) {
  const [one, other] = runs.map((run) => lastMeasured(versions.filter((version) => version.run === run))).filter(Boolean);
  return [one, other ?? one];
}

// The first version, and the last one that shares a dataset with the first.
function floorAndLast(versions) {
  const met = versions[0].datasets.map((row) => row.dataset);
  const alike = versions.slice(1).findLast((version) => version.datasets.some((row) => met.includes(row.dataset)));
  return [versions[0], alike ?? lastMeasured(versions)];
}

function fillChoices(versions) {
  const selects = [form.elements.a, form.elements.b];
  const known = [...selects[0].options].map((option) => option.value);
  const fresh = versions.filter((version) => !known.includes(key(version)));
  const untouched = !form.dataset.touched;
  selects.forEach((select) => fresh.forEach((version) => select.add(new Option(`${name(version)} (${version.reason})`, key(version)))));
  if (!untouched || !versions.length) return;
  const [one, other] = (runs.length > 1 ? lastOfTwoRuns : floorAndLast)(versions);
  selects[0].value = key(one);
  selects[1].value = key(other);
}

const driftInWords = (drift) => `at ${drift.offset}: ${fixed(3)(drift.rate_before)} to ${fixed(3)(drift.rate_after)}, ${drift.action}`;

const ROWS = [
  ["run", (version) => version.run], ["target", (version) => version.target],
  ["published at prompt", (version) => version.offset, whole], ["reason", (version) => version.reason],
  ["parent", (version) => version.parent], ["response to drift", (version) => version.drift && driftInWords(version.drift)],
  ["prompts while the latest", (version) => version.prompts, whole, 0], ["judged tokens", (version) => version.judged, whole, 0],
  ["acceptance", (version) => version.acceptance, fixed(3), 3], ["tokens per target forward", (version) => version.efficiency, fixed(2), 2],
  ["acceptance before it", (version) => version.acceptance_before, fixed(3), 3], ["n-grams in the cache", (version) => version.cache_entries, whole, 0],
  ["drafter's update", (version) => version.drafter_version, whole, 0], ["head's update", (version) => version.head_version, whole, 0],
  ["updates while the latest", (version) => version.steps, whole, 0], ["seconds of learning", (version) => version.seconds, fixed(1), 1],
  ["tokens gained", (version) => version.gained, fixed(0), 0], ["folder", (version) => version.folder], ["sha256", (version) => version.digest && `${version.digest.slice(0, 16)}…`],
];

function compare(versions) {
  const [one, other] = [form.elements.a.value, form.elements.b.value].map((value) => versions.find((version) => key(version) === value));
  if (!one || !other) return table(element("compared"), [{ title: "version", of: () => "" }], [], "Two versions");
  const difference = ([, of, , digits]) => (digits === undefined || of(one) === null || of(other) === null ? "" : signed(digits)(of(other) - of(one)));
  table(element("compared"), [
    { title: "", of: (row) => row[0] }, { title: `A: ${name(one)}`, of: (row) => row[1](one), show: undefined, number: true },
    { title: `B: ${name(other)}`, of: (row) => row[1](other), number: true }, { title: "B − A", of: difference, number: true },
  ].map((column, number) => (number === 1 || number === 2 ? { ...column, of: (row) => (row[2] ? row[2](column.of(row)) : column.of(row) ?? "–") } : column)), ROWS, "Comparison of two versions");
  bars(one, other);
}

function bars(one, other) {
  const datasets = [...new Set([...one.datasets, ...other.datasets].map((row) => row.dataset))];
  const trace = (version, letter, look, shape) => {
    const rows = datasets.map((dataset) => version.datasets.find((row) => row.dataset === dataset));
    return { type: "bar", name: `${letter}: ${plain(name(version))}`, x: datasets.map(plain),
      y: rows.map((row) => row && ratio(row.accepted, row.judged)), customdata: rows.map((row) => row?.judged ?? 0),
      text: rows.map((row) => (row ? fixed(3)(ratio(row.accepted, row.judged)) : "none")), textposition: "outside",
      marker: { color: look.color, pattern: pattern(shape) },
      hovertemplate: "%{y:.3f} of %{customdata:,d} judged<extra></extra>" };
  };
  chart(element("bars"), [trace(one, "A", style(0), ""), trace(other, "B", style(1), "/")], {
    barmode: "group", margin: { l: 60, r: 10, t: 40, b: 40 }, xaxis: { title: { text: "dataset" }, type: "category" }, yaxis: { title: { text: "acceptance" }, range: [0, 1.08] },
  });
}

function showAll(versions) {
  const colors = new Map(runs.map((run, number) => [run, style(number).color]));
  table(element("all"), [
    { title: "run", of: (row) => make("span", {}, swatch(colors.get(row.run)), make("bdi", { text: row.run })) },
    { title: "version", of: (row) => row.version, number: true }, { title: "parent", of: (row) => row.parent, number: true }, { title: "target", of: (row) => row.target },
    { title: "reason", of: (row) => row.reason }, { title: "prompt", of: (row) => row.offset, show: whole, number: true },
    { title: "acceptance", of: (row) => row.acceptance, show: fixed(3), number: true }, { title: "judged", of: (row) => row.judged, show: whole, number: true },
    { title: "tokens per forward", of: (row) => row.efficiency, show: fixed(2), number: true }, { title: "n-grams", of: (row) => row.cache_entries, show: whole, number: true },
    { title: "drafter", of: (row) => row.drafter_version, number: true }, { title: "updates", of: (row) => row.steps, show: whole, number: true },
    { title: "tokens gained", of: (row) => row.gained, show: fixed(0), number: true },
  ], versions, "All versions");
}

if (runs.length) {
  live(async (again) => {
    const answer = await question("versions", { again });
    if (!answer) return;
    found = joined(answer);
    draw(found, answer.recalls);
    fillChoices(found);
    compare(found);
    showAll(found);
    element("shown").textContent = answer.total > found.length ? `The last ${whole(found.length)} of ${whole(answer.total)} are shown.` : "";
  });
  form.addEventListener("change", () => {
    form.dataset.touched = "yes";
    if (found) compare(found);
  });
}

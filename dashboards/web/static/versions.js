// Published versions: what differs, the probe, and a comparison of two.
import { chart, element, fixed, interval, live, make, narrow, plain, question, room, runs, signed, style, swatch, table, whole } from "./common.js";

const SHAPES = { baseline: "square", interval: "circle", drift: "triangle-down", end: "diamond" };
const form = element("pair");
let found = null;
let registered = [];

const key = (version) => JSON.stringify([version.run, version.version]);
const name = (version) => `version ${runs.length > 1 ? `${version.run}/` : ""}${version.version}`;
const estimate = (found, digits) => (found ? `${found.value.toFixed(digits)} (${found.low.toFixed(digits)} to ${found.high.toFixed(digits)})` : "–");

// The versions in the order of the chosen runs.
const sorted = (versions) => versions.toSorted((one, other) => runs.indexOf(one.run) - runs.indexOf(other.run) || one.version - other.version);

const rateOf = (name) => (version) => version.probe?.[name]?.value ?? null;
const registeredOf = (version) => registered.find((row) => row.run === version.run && row.version === version.version);
const aliasesOf = (version) => registeredOf(version)?.aliases ?? [];

// Acceptance (left) and tokens per target forward (right) of each version on the probe, in the order of publication.
function drawProbe(versions) {
  const place = element("probe");
  const measured = versions.filter((version) => version.probe);
  place.hidden = !measured.length;
  if (!measured.length) return;
  const lines = [...new Set(measured.map((version) => JSON.stringify([version.run, version.target])))].map((line) => JSON.parse(line));
  const trace = (mine, look, label, rate, axis, dash, shown) => {
    const found = mine.filter((version) => version.probe[rate]);
    const end = (key, sign) => found.map((version) => sign * (version.probe[rate][key] - version.probe[rate].value));
    return {
      type: "scatter", mode: "lines+markers", name: label, legendgroup: label, showlegend: shown, xaxis: axis === "y2" ? "x2" : "x", yaxis: axis,
      x: found.map((version) => version.offset), y: found.map(rateOf(rate)), line: { color: look.color, dash, width: 2 },
      marker: { color: look.color, size: 9, symbol: found.map((version) => `${SHAPES[version.reason] ?? "circle"}${dash === "dot" ? "-open" : ""}`) },
      error_y: { type: "data", symmetric: false, array: end("high", 1), arrayminus: end("low", -1), color: `${look.color}88`, thickness: 2, width: 4 },
      hovertext: found.map((version) => plain(`${name(version)}: ${estimate(version.probe[rate], axis === "y2" ? 2 : 3)}`)), hoverinfo: "text",
    };
  };
  const traces = lines.flatMap(([run, target], number) => {
    const mine = measured.filter((version) => version.run === run && version.target === target);
    const look = style(number);
    const label = plain(lines.length > 1 ? `${run}: ${target}` : run);
    return [trace(mine, look, label, "greedy", "y", "solid", lines.length > 1), trace(mine, look, label, "sampled", "y", "dot", false), trace(mine, look, label, "forwards", "y2", look.dash, false)];
  });
  const x = { title: { text: "published at prompt" }, range: room(measured.map((version) => version.offset)), tickformat: ",d", zeroline: false };
  const tall = narrow();
  chart(place, traces, {
    hovermode: "closest", grid: { rows: tall ? 2 : 1, columns: tall ? 1 : 2, pattern: "independent", xgap: 0.12, ygap: 0.3 },
    xaxis: x, xaxis2: x, yaxis: { title: { text: "acceptance" }, rangemode: "tozero" }, yaxis2: { title: { text: "tokens per forward" }, anchor: "x2" },
  });
}

function showVerdicts(verdicts) {
  const place = element("verdict");
  place.classList.remove("loading");
  const sorted = verdicts.toSorted((one, other) => runs.indexOf(one.run) - runs.indexOf(other.run));
  place.replaceChildren(...sorted.map(({ run, target, sentences }) => {
    const named = runs.length > 1 || verdicts.length > 1;
    return make("p", {}, ...(named ? [make("b", { text: `${run}, ${target}: ` })] : []), sentences.join(" "));
  }));
  const held = registered.filter((row) => row.aliases.length);
  const words = held.map((row) => `${row.aliases.join(" and ")} is version ${runs.length > 1 ? `${row.run}/` : ""}${row.version} (models:/${row.name}/${row.number})`);
  if (words.length) place.append(make("p", { text: `In MLflow, ${words.join("; ")}.` }));
}

// The baseline and the newest version of the first run; of several runs, the newest of the first two that served a prompt.
function firstChoice(versions) {
  const newest = (run) => versions.findLast((version) => version.run === run && version.prompts) ?? versions.findLast((version) => version.run === run);
  if (runs.length > 1 && newest(runs[0]) && newest(runs[1])) return [newest(runs[0]), newest(runs[1])];
  const last = versions.findLast((version) => version.run === versions[0].run);
  return [versions.find((version) => version.target === last.target && version.run === last.run) ?? last, last];
}

function fillChoices(versions) {
  const selects = [form.elements.a, form.elements.b];
  const known = [...selects[0].options].map((option) => option.value);
  const fresh = versions.filter((version) => !known.includes(key(version)));
  const untouched = !form.dataset.touched;
  selects.forEach((select) => fresh.forEach((version) => select.add(new Option(`${name(version)} (${version.parent === null ? "baseline" : version.reason})`, key(version)))));
  if (!untouched || !versions.length) return;
  const [one, other] = firstChoice(versions);
  selects[0].value = key(one);
  selects[1].value = key(other);
}

// What matters; DETAILS are folded. Of the rows with digits, a difference is shown; of those with a rate on the probe, one whose
// interval lies above the other's is marked.
const ROWS = [
  { title: "probe: tokens per forward", of: rateOf("forwards"), show: (_, version) => estimate(version.probe?.forwards, 2), digits: 2, rate: "forwards" },
  { title: "probe: acceptance, greedy", of: rateOf("greedy"), show: (_, version) => estimate(version.probe?.greedy, 3), digits: 3, rate: "greedy" },
  { title: "probe: acceptance, temperature 1", of: rateOf("sampled"), show: (_, version) => estimate(version.probe?.sampled, 3), digits: 3, rate: "sampled" },
  { title: "in service: acceptance", of: (version) => version.acceptance, show: (value, version) => estimate(value === null ? null : { ...version, value }, 3), digits: 3 }, { title: "in service: tokens per target forward", of: (version) => version.efficiency, show: fixed(2), digits: 2 },
  { title: "in service: prompts", of: (version) => version.prompts, show: whole, digits: 0 }, { title: "reason", of: (version) => version.reason }, { title: "changes", of: (version) => version.changes },
  { title: "alias", of: (version) => aliasesOf(version).join(", ") || null },
];
const DETAILS = [
  { title: "number in the registry", of: (version) => registeredOf(version)?.number ?? null, show: (value) => (value === null ? "–" : `#${value}`) }, { title: "judged tokens", of: (version) => version.judged, show: whole, digits: 0 },
  { title: "published at prompt", of: (version) => version.offset, show: whole }, { title: "parent", of: (version) => version.parent }, { title: "n-grams in the cache", of: (version) => version.cache_entries, show: whole, digits: 0 },
  { title: "drafter's update", of: (version) => version.drafter_version, show: whole, digits: 0 }, { title: "head's update", of: (version) => version.head_version, show: whole, digits: 0 },
  { title: "run", of: (version) => version.run }, { title: "target", of: (version) => version.target }, { title: "folder", of: (version) => version.folder },
  { title: "sha256", of: (version) => version.digest && `${version.digest.slice(0, 16)}…` },
];

function compare(versions) {
  const [one, other] = [form.elements.a.value, form.elements.b.value].map((value) => versions.find((version) => key(version) === value));
  if (!one || !other) return table(element("compared"), [{ title: "version", of: () => "" }], [], "Two versions");
  const difference = ({ of, digits }) => (digits === undefined || of(one) === null || of(other) === null ? "" : signed(digits)(of(other) - of(one)));
  const isSame = one.drafter_digest !== "" && one.drafter_digest === other.drafter_digest;
  element("pair-equal").textContent = isSame ? "Equal drafters: A and B have the same weights." : "";
  element("pair-differs").hidden = isSame;
  if (isSame) return (element("pair-command").textContent = "");
  const cell = (version, rival) => (row) => {
    const [value, theirs] = [row.of(version), row.of(rival)];
    const better = row.rate && value !== null && theirs !== null && version.probe[row.rate].low > rival.probe[row.rate].high;
    return make(better ? "b" : "span", { text: `${row.show ? row.show(value, version) : value ?? "–"}`, className: better ? "better" : "" });
  };
  const columns = [
    { title: "", of: (row) => row.title }, { title: `A: ${name(one)}`, of: cell(one, other), number: true },
    { title: `B: ${name(other)}`, of: cell(other, one), number: true }, { title: "B − A", of: difference, number: true },
  ];
  table(element("compared"), columns, ROWS, "Comparison of two versions");
  table(element("compared-details"), columns, DETAILS, "Details of two versions");
  const [first, second] = [one, other].map(registeredOf);
  const comparable = first && second && first !== second && first.name === second.name;
  element("pair-command").textContent = comparable ? `omnidraft versions compare ${first.number} ${second.number} --name ${first.name}` : "";
}

// An interval, which a narrow column puts below its estimate and does not divide.
const inTwoLines = (text) => text.replaceAll(" to ", "\u00a0to\u00a0");

function showAll(versions) {
  const colors = new Map(runs.map((run, number) => [run, style(number).color]));
  const best = Math.max(...versions.map((version) => rateOf("greedy")(version) ?? -1));
  const ranked = versions.toSorted((one, other) => (rateOf("greedy")(other) ?? -1) - (rateOf("greedy")(one) ?? -1) || runs.indexOf(one.run) - runs.indexOf(other.run) || one.version - other.version);
  const isBest = (version) => version.gain?.greedy?.low > 0 && rateOf("greedy")(version) === best && versions.filter((other) => rateOf("greedy")(other) === best).length === 1;
  const fits = (column) => !narrow() || !column.wide; // a phone shows these of two versions
  table(element("all"), [
    { title: "version", of: (row) => make("span", {}, ...(runs.length > 1 ? [swatch(colors.get(row.run)), make("bdi", { text: `${row.run}/` })] : []), make("b", { text: `${row.version}` }), isBest(row) ? " ★" : ""), by: (row) => row.version, short: true },
    { title: "registry", of: (row) => [...(registeredOf(row) ? [`#${registeredOf(row).number}`] : []), ...aliasesOf(row)].join(" ") || "–", by: (row) => registeredOf(row)?.number ?? null, wide: true },
    { title: "probe, greedy", of: (row) => inTwoLines(estimate(row.probe?.greedy, 3)), by: rateOf("greedy"), number: true },
    { title: "over the baseline", of: (row) => (row.parent === null ? "baseline" : row.gain?.greedy ? inTwoLines(`${signed(3)(row.gain.greedy.value)} (${signed(3)(row.gain.greedy.low)} to ${signed(3)(row.gain.greedy.high)})`) : "–"), by: (row) => row.gain?.greedy?.value ?? null, number: true },
    { title: "probe, tokens / forward", of: (row) => inTwoLines(estimate(row.probe?.forwards, 2)), by: rateOf("forwards"), number: true }, { title: "probe, temperature 1", of: (row) => inTwoLines(estimate(row.probe?.sampled, 3)), by: rateOf("sampled"), number: true, wide: true },
    { title: "parent", of: (row) => row.parent, number: true, wide: true }, { title: "reason", of: (row) => row.reason }, { title: "prompt", of: (row) => row.offset, show: whole, number: true },
    { title: "changes", of: (row) => row.changes || "–" },
    { title: "acceptance in service", of: interval, by: (row) => row.acceptance, number: true }, { title: "tokens / forward in service", of: (row) => row.efficiency, show: fixed(2), number: true },
    ...(new Set(versions.map((version) => version.target)).size > 1 ? [{ title: "target", of: (row) => row.target }] : []),
  ].filter(fits), ranked, "All versions, the best on the probe first");
}

// A metric of a comparison: both values, and the change with its interval; the change of a speed is a ratio.
function changeOf(metric, digits, isRatio) {
  if (!metric || metric.first === null || metric.second === null) return "–";
  const show = (value) => (isRatio ? `×${value.toFixed(2)}` : signed(digits)(value));
  const even = isRatio ? 1 : 0;
  const isClear = metric.low !== null && (metric.low > even || metric.high < even);
  const range = metric.low === null ? "" : ` (${show(metric.low)} to ${show(metric.high)})`;
  const change = metric.change === null ? "" : make(isClear ? "b" : "span", { text: show(metric.change), className: isClear && metric.low > even ? "better" : "" });
  return make("span", {}, `${metric.first.toFixed(digits)} → ${metric.second.toFixed(digits)}: `, change, make("small", { text: range }));
}

function showComparisons(comparisons) {
  const side = (which) => ({ [which]: { number, run, version } }) => `#${number}${run === null ? "" : ` (${run}/${version})`}`;
  table(element("comparisons"), [
    { title: "A", of: side("first") }, { title: "B", of: side("second") }, { title: "prompts", of: (row) => row.prompts, show: whole, number: true },
    { title: "acceptance", of: (row) => changeOf(row.acceptance_rate, 3), number: true }, { title: "tokens / forward", of: (row) => changeOf(row.block_efficiency, 2), number: true },
    { title: "tokens / second", of: (row) => changeOf(row.tokens_per_second, 1, true), number: true },
    { title: "when", of: (row) => new Date(row.made_at * 1000).toLocaleString(), short: true },
  ], comparisons, "Comparisons of two versions, the newest first");
}

let verdicts = [];

function show() {
  showVerdicts(verdicts);
  compare(found);
  showAll(found);
}

if (runs.length) {
  live(async (again) => {
    const answer = await question("versions", { again });
    if (!answer) return;
    found = sorted(answer.versions);
    verdicts = answer.verdicts;
    const equal = verdicts.length > 0 && verdicts.every((verdict) => verdict.equal);
    document.querySelectorAll("[data-differs]").forEach((part) => (part.hidden = equal)); // the one line says it all
    if (equal && element("verdict").classList.contains("loading")) element("every").open = false;
    drawProbe(found);
    fillChoices(found);
    show();
    element("shown").textContent = answer.total > found.length ? `The last ${whole(found.length)} of ${whole(answer.total)} are shown.` : "";
  });
  // MLflow is slow, so its answer comes later.
  live(async () => {
    showComparisons(await question("comparisons"));
    const fresh = await question("registry");
    if (JSON.stringify(fresh) === JSON.stringify(registered)) return;
    registered = fresh;
    if (found) show();
  });
  form.addEventListener("change", () => {
    form.dataset.touched = "yes";
    if (found) compare(found);
  });
}

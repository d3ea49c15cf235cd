// What each source of drafts gave and what the memory holds, by spelling, and acceptance by the length of the match.
import { cards, chart, colorOf, element, fixed, interval, later, live, make, pattern, percent, plain, question, runs, story, style, table, whole } from "./common.js";

const SOURCES = { memory: { name: "memory", color: colorOf("pink"), shape: "." }, lookup: { name: "own text", color: colorOf("amber"), shape: "/" }, model: { name: "model", color: colorOf("blue"), shape: "" } };
const form = element("choices");
const settings = () => ({ source: form.elements.source.value, search: form.elements.search.value });
const nameOf = (row) => SOURCES[row.source]?.name ?? row.source;
const run = runs.length > 1 ? [{ title: "run", of: (row) => row.run }] : [];

function showTotals({ sources }) {
  cards(element("totals"), runs.map((name, number) => {
    const mine = sources.filter((row) => row.run === name);
    const all = mine.reduce((sum, row) => sum + row.accepted, 0);
    return { name, color: style(number).color, metrics: Object.entries(SOURCES).map(([source, look]) => {
      const row = mine.find((one) => one.source === source);
      return [`accepted, ${look.name}`, whole(row?.accepted ?? 0), all ? `${percent((row?.accepted ?? 0) / all)} of all` : ""];
    }) };
  }));
}

function showLengths({ lengths }) {
  const kinds = ["memory", "lookup"].flatMap((source) => runs.map((name, number) => ({ source, name, number, rows: lengths.filter((row) => row.source === source && row.run === name) }))).filter(({ rows }) => rows.length);
  chart(element("lengths"), kinds.map(({ source, name, number, rows }) => ({
    type: "bar", name: plain(runs.length > 1 ? `${name}: ${SOURCES[source].name}` : SOURCES[source].name), x: rows.map((row) => row.matched), y: rows.map((row) => row.acceptance),
    marker: { color: runs.length > 1 ? style(number).color : SOURCES[source].color, pattern: pattern(SOURCES[source].shape) },
    error_y: { type: "data", symmetric: false, array: rows.map((row) => row.high - row.acceptance), arrayminus: rows.map((row) => row.acceptance - row.low), color: colorOf("soft"), thickness: 1.5, width: 3 },
    customdata: rows.map((row) => [row.accepted, row.judged]), hovertemplate: "%{y:.1%} accepted (%{customdata[0]:,d} of %{customdata[1]:,d}) with %{x} tokens matched<extra></extra>",
  })), {
    barmode: "group", showlegend: kinds.length > 1, xaxis: { title: { text: "tokens of context that matched" }, ...(lengths.length > 20 ? {} : { dtick: 1 }) }, yaxis: { title: { text: "accepted" }, range: [0, 1], tickformat: ".0%" },
  });
  table(element("lengths-table"), [
    ...run, { title: "source", of: nameOf }, { title: "tokens matched", of: (row) => row.matched, number: true }, { title: "accepted", of: interval, by: (row) => row.acceptance, number: true },
    { title: "mean chance", of: (row) => row.chance, show: fixed(3), number: true },
  ], lengths, "Acceptance by length of the match");
}

const quoted = (text) => (text ? make("span", { text: `“${text}”` }) : "–");
const where = (row) => make("a", { href: `/text?${new URLSearchParams({ run: row.run, offset: row.offset })}`, text: whole(row.offset) });

async function showAccepted(again) {
  const found = await question("memory/accepted", { parameters: settings(), again });
  if (!found) return;
  element("shown").textContent = found.total > found.entries.length ? `the first ${whole(found.entries.length)} of ${whole(found.total)}` : `${whole(found.total)} found`;
  table(element("accepted"), [
    ...run, { title: "token", of: (row) => quoted(row.token), code: true }, { title: "context", of: (row) => quoted(row.context), code: true }, { title: "source", of: nameOf, short: true },
    { title: "accepted", of: (row) => row.accepted, show: whole, number: true }, { title: "of judged", of: (row) => row.judged, show: whole, number: true },
    { title: "share", of: (row) => row.acceptance, show: percent, number: true }, { title: "chance", of: (row) => row.chance, show: fixed(2), number: true },
    { title: "seen", of: (row) => row.seen, show: whole, number: true }, { title: "matched", of: (row) => row.matched || null, show: whole, number: true }, { title: "last at prompt", of: where, by: (row) => row.offset, number: true },
  ], found.entries, "Contexts and tokens with the most accepted tokens");
}

const holding = element("holding");

async function showHeld(again) {
  const found = await question("memory/held", { parameters: { search: holding.elements.search.value }, again });
  if (!found) return;
  const held = found.held.map((row) => `${runs.length > 1 ? `${row.run}: ` : ""}${whole(row.contexts)} contexts of ${whole(row.texts)} texts, ${percent(row.contexts ? row.spelt / row.contexts : 0)} of them spelt, in version ${row.version}`).join("; ");
  element("held-shown").textContent = held ? `${held}. ${found.total > found.entries.length ? `The ${whole(found.entries.length)} most seen of ` : ""}${whole(found.total)} found.` : "No version of the run holds a memory.";
  table(element("held"), [
    ...run, { title: "context", of: (row) => (row.context === null ? make("i", { text: "no spelling" }) : quoted(row.context)), code: true },
    { title: "followed by", of: (row) => row.followed.map(([text, count]) => `“${text}” × ${whole(count)}`).join("  "), code: true },
    { title: "seen", of: (row) => row.seen, show: whole, number: true }, { title: "tokens of context", of: (row) => row.length, show: whole, number: true },
    ...(found.held.length > runs.length ? [{ title: "target", of: (row) => row.target }] : []),
  ], found.entries, "Contexts that the memory holds, the most seen first");
}

if (runs.length) {
  const store = live(showHeld);
  holding.addEventListener("submit", (event) => event.preventDefault());
  holding.addEventListener("input", later(store.now));
  const list = live(showAccepted);
  live(async (again) => {
    const found = await question("memory", { again });
    if (!found) return;
    story(element("story"), found.story);
    showTotals(found);
    showLengths(found);
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", later(list.now));
}

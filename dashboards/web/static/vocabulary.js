// How the target's tokens are spelt by the drafter's pieces.
import { chart, element, live, pattern, percent, plain, question, runs, story, style, table, whole } from "./common.js";

const SHAPES = ["", "/", "x", ".", "-", "|", "+", "\\"];
const nameOf = (pair, pairs) => [...(runs.length > 1 ? [pair.run] : []), ...(pairs.length > runs.length || runs.length === 1 ? [pair.target] : [])].join(": ");

function draw(pairs) {
  const place = element("chart");
  place.hidden = !pairs.length;
  if (!pairs.length) return;
  chart(place, pairs.map((pair, number) => ({
    type: "bar", name: plain(nameOf(pair, pairs)), x: pair.classes.map((row) => row.name), y: pair.classes.map((row) => row.share), customdata: pair.classes.map((row) => row.count),
    marker: { color: style(number).color, pattern: pattern(SHAPES[number % SHAPES.length]) }, hovertemplate: "%{y:.1%}: %{customdata:,d} tokens<extra></extra>",
  })), { barmode: "group", showlegend: pairs.length > 1, xaxis: { type: "category" }, yaxis: { title: { text: "share of the target's tokens" }, tickformat: ".0%", rangemode: "tozero" } });
}

if (runs.length) live(async (again) => {
  const found = await question("vocabulary", { again });
  if (!found) return;
  story(element("story"), found.story);
  draw(found.pairs);
  const several = found.pairs.length > 1 ? [{ title: "pair", of: (row) => row.pair }] : [];
  const label = (pair) => `${runs.length > 1 ? `${pair.run}: ` : ""}${pair.target}`;
  table(element("classes"), [
    ...several, { title: "spelt by", of: (row) => row.name }, { title: "tokens", of: (row) => row.count, show: whole, number: true }, { title: "share", of: (row) => row.share, show: percent, number: true },
    { title: "judged in the run", of: (row) => row.judged, show: whole, number: true }, { title: "accepted", of: (row) => row.accepted, show: whole, number: true },
  ], found.pairs.flatMap((pair) => pair.classes.map((row) => ({ ...row, pair: label(pair) }))), "Tokens of the target by their pieces");
  const specials = found.pairs.flatMap((pair) => pair.specials.map((row) => ({ ...row, pair: label(pair) })));
  const total = found.pairs.reduce((sum, pair) => sum + pair.specials_total, 0);
  element("shown").textContent = total > specials.length ? `${whole(specials.length)} of ${whole(total)} are shown.` : "";
  table(element("specials"), [
    ...several, { title: "token", of: (row) => String(row.name), code: true }, { title: "id", of: (row) => row.token, number: true }, { title: "mapped by", of: (row) => String(row.how) },
    { title: "pieces", of: (row) => (row.text ?? []).join(" ") || "–", code: true },
  ], specials, "Special tokens and their pieces");
});

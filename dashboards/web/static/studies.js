// Tables and figures of the paper: plots of their panels, with the values in a table below each.
import { chart, element, live, narrow, plain, question, style, table } from "./common.js";

const number = (value) => (value === null || value === undefined ? "–" : value.toLocaleString("en", { maximumSignificantDigits: 4 }));
const MOST_ROWS = 12; // points of a curve in a table
const MARGIN = { l: 48, r: 12, t: 8, b: 40 };

function make(name, text = "", kind = "") {
  const made = document.createElement(name);
  made.textContent = text;
  made.className = kind;
  return made;
}

function marks(panel) {
  return panel.series.map((series, index) => {
    const look = style(index);
    const shift = (index - (panel.series.length - 1) / 2) * 0.16;
    return {
      type: "scatter", mode: "markers", name: plain(series.name), cliponaxis: false,
      x: series.values, y: panel.categories.map((_, row) => row + shift),
      marker: { color: look.color, size: 9, symbol: `${look.symbol}${series.is_paper ? "-open" : ""}` },
      ...(series.errors ? { error_x: { type: "data", array: series.errors.map((error) => error ?? 0), color: look.color, thickness: 1.5, width: 4 } } : {}),
      hovertext: series.values.map((value, row) => plain(`${panel.categories[row]}: ${number(value)} (${series.name})`)), hoverinfo: "text",
    };
  });
}

function curves(panel) {
  return panel.series.map((series, index) => {
    const look = style(index);
    return {
      type: "scatter", mode: "lines", name: plain(series.name), x: series.at, y: series.values, line: { color: look.color, dash: look.dash, width: 2 },
      hovertemplate: `%{x}: %{y:.3f}<extra>${plain(series.name)}</extra>`,
    };
  });
}

const changes = (panel) => Object.entries(panel.marks ?? {}).map(([name, at]) => ({
  line: { type: "line", x0: at, x1: at, yref: "paper", y0: 0, y1: 1, line: { color: style(7).color, width: 1 } },
  words: { x: at, yref: "paper", y: 1, text: plain(name), showarrow: false, textangle: -90, xanchor: "right", yanchor: "top", font: { size: 11 } },
}));

function draw(place, panel) {
  const axis = panel.is_logarithmic ? { type: "log" } : {};
  const below = (y) => ({ orientation: "h", y, yanchor: "top" });
  if (panel.categories.length) {
    place.style.height = `${150 + 34 * panel.categories.length + 20 * (narrow() ? panel.series.length : 1)}px`;
    chart(place, marks(panel), {
      hovermode: "closest", legend: below(-0.12), margin: MARGIN, xaxis: { rangemode: "tozero" },
      yaxis: { tickvals: panel.categories.map((_, row) => row), ticktext: panel.categories.map(plain), range: [panel.categories.length - 0.4, -0.6], zeroline: false, automargin: true },
    });
    return;
  }
  place.style.height = `${330 + (narrow() ? 22 * panel.series.length : 30)}px`;
  const found = changes(panel);
  chart(place, curves(panel), {
    hovermode: "closest", legend: below(-0.2), margin: MARGIN, shapes: found.map((one) => one.line), annotations: found.map((one) => one.words),
    xaxis: { title: { text: plain(panel.across) }, ...axis }, yaxis: panel.is_logarithmic ? axis : { rangemode: "tozero" },
  });
}

// One row per category, or per point of the longest curve, of which at most MOST_ROWS are shown.
function rowsOf(panel) {
  if (panel.categories.length) return panel.categories.map((name, row) => ({ name, values: panel.series.map((series) => number(series.values[row])) }));
  const longest = panel.series.reduce((best, series) => (series.at.length > best.length ? series.at : best), []);
  const step = Math.max(1, Math.ceil(longest.length / MOST_ROWS));
  const valueAt = (series, at) => number(series.values[series.at.indexOf(at)]);
  return longest.filter((_, place) => place % step === 0).map((at) => ({ name: number(at), values: panel.series.map((series) => valueAt(series, at)) }));
}

function show(study) {
  const section = make("section");
  section.id = study.file.replaceAll(/[^A-Za-z0-9]+/g, "-");
  section.append(make("h2", study.title), make("p", study.remark, "note"));
  const typed = make("p", `${study.date}: `, "note");
  typed.append(make("code", study.command));
  const plots = make("div", "", "plots");
  section.append(...study.measured.map((text) => make("p", text, "note")), typed, plots);
  element("studies").append(section);
  const drawn = study.panels.map((panel) => {
    const part = make("div");
    const heading = panel.title ? `${panel.title}: ${panel.value}` : panel.value;
    const place = make("div", "", "chart");
    place.setAttribute("role", "img");
    place.setAttribute("aria-label", `${study.title}, ${heading}; the table below has the values`);
    const values = make("details");
    const list = make("div", "", "scroll");
    values.append(make("summary", "Values"), list);
    part.append(make("h3", heading), place, values);
    plots.append(part);
    table(list, [
      { title: panel.categories.length ? "arm" : panel.across, of: (row) => row.name },
      ...panel.series.map((series, index) => ({ title: series.name, of: (row) => row.values[index], number: true })),
    ], rowsOf(panel), heading);
    return place;
  });
  study.panels.forEach((panel, index) => draw(drawn[index], panel)); // once all are there: a chart is as wide as its place was
}

let shown = "";
live(async () => {
  const found = await question("studies", { names: [] });
  if (!found) return;
  const text = JSON.stringify(found);
  if (text === shown) return;
  shown = text;
  const place = element("studies");
  place.classList.remove("loading");
  place.replaceChildren();
  element("none").hidden = found.length > 0;
  element("contents").replaceChildren(...found.map((study) => {
    const twins = found.filter((other) => other.title === study.title).length > 1;
    const link = make("a", twins ? `${study.title} (${study.file.split("/")[0]})` : study.title);
    link.href = `#${study.file.replaceAll(/[^A-Za-z0-9]+/g, "-")}`;
    return link;
  }));
  found.forEach(show);
});

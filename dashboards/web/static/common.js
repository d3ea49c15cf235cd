// Shared parts of the pages: requests to the server, errors, tables, and the style of charts.

// Those of Okabe and Ito's colours that are dark enough for lines, each with its own dash and marker.
export const STYLES = [
  { color: "#0072b2", dash: "solid", symbol: "circle" },
  { color: "#d55e00", dash: "dash", symbol: "square" },
  { color: "#009e73", dash: "dot", symbol: "diamond" },
  { color: "#cc79a7", dash: "dashdot", symbol: "triangle-up" },
  { color: "#e69f00", dash: "longdash", symbol: "triangle-down" },
  { color: "#56b4e9", dash: "longdashdot", symbol: "pentagon" },
  { color: "#111111", dash: "solid", symbol: "x" },
  { color: "#7a7a7a", dash: "dash", symbol: "star" },
];
export const style = (number) => STYLES[number % STYLES.length];
export const runs = JSON.parse(document.body.dataset.runs);
export const element = (id) => document.getElementById(id);

const EVERY = 2000; // milliseconds between two requests for a running run
const STILL = 60; // seconds
const etags = new Map();
const problems = new Map();

// Errors of a request by the user, and of the periodic requests of the page; one does not hide the other.
export function problem(message, asker = "person") {
  problems.set(asker, message);
  const place = element("problem");
  place.textContent = [...problems.values()].filter(Boolean).join("\n");
  place.hidden = !place.textContent;
}

// The response to a request; undefined if it has not changed. Throws an Error with the server's message.
export async function question(path, { parameters = {}, names = runs, again = false } = {}) {
  const asked = new URLSearchParams(parameters);
  names.forEach((name) => asked.append("run", name));
  const url = `/api/${path}?${asked}`;
  const headers = again && etags.has(url) ? { "If-None-Match": etags.get(url) } : {};
  const response = await reach(url, { headers, cache: "no-store" });
  if (response.status === 304) return undefined;
  etags.set(url, response.headers.get("ETag"));
  return response.headers.get("Content-Type").includes("json") ? response.json() : response.text();
}

export async function reach(url, options) {
  let response;
  try {
    response = await fetch(url, options);
  } catch {
    throw new Error("The server does not answer. Is `omnidraft dashboard` still running? This page tries again.");
  }
  if (response.ok || response.status === 304) return response;
  const text = await response.text();
  try {
    throw new Error(JSON.parse(text).error);
  } catch (error) {
    throw error instanceof SyntaxError ? new Error(text) : error;
  }
}

// Runs `step(again)` now, and every two seconds while the page is visible and no step is running. `now()` of the
// returned object runs it next.
export function live(step) {
  let turn = Promise.resolve();
  let pending = 0;
  const tick = (again) => {
    pending += 1;
    turn = turn.then(async () => {
      try {
        await step(again);
        problem("", "page");
      } catch (error) {
        problem(error.message, "page");
      } finally {
        pending -= 1;
      }
    });
    return turn;
  };
  tick(false);
  setInterval(() => document.hidden || pending || tick(true), EVERY);
  return { now: () => tick(false) };
}

const count = new Intl.NumberFormat("en");
export const whole = (value) => (value === null || value === undefined ? "–" : count.format(value));
export const fixed = (digits) => (value) => (value === null || value === undefined ? "–" : Number(value).toFixed(digits));
export const signed = (digits) => (value) => (value === null || value === undefined ? "–" : (value > 0 ? "+" : "") + Number(value).toFixed(digits));
export const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)}%`);

// `<` and `&` as text where Plotly reads a little markup.
export const plain = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

export function make(tag, { text, className, ...attributes } = {}, ...children) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  Object.entries(attributes).forEach(([name, value]) => made.setAttribute(name, value));
  made.append(...children);
  return made;
}

// Columns are { title, of: row => value, show: value => text, number, text, code }.
export function table(place, columns, rows, caption) {
  const kind = (column) => (column.number ? "number" : column.code ? "code" : column.text ? "text" : "");
  const head = make("tr", {}, ...columns.map((column) => make("th", { text: column.title, className: kind(column), scope: "col" })));
  const body = rows.map((row) => make("tr", {}, ...columns.map((column) => cell(column, column.of(row), kind(column)))));
  const top = place.scrollTop;
  place.replaceChildren(make("table", { "aria-label": caption }, make("thead", {}, head), make("tbody", {}, ...body)));
  if (!rows.length) place.append(make("p", { text: "Nothing yet.", className: "note" }));
  place.tabIndex = 0;
  place.scrollTop = top;
}

function cell(column, value, className) {
  const made = make("td", { className, dir: "auto" });
  if (value instanceof Node) made.append(value);
  else made.textContent = column.show ? column.show(value) : value ?? "–";
  return made;
}

export function cards(place, groups) {
  place.replaceChildren(...groups.map(({ name, color, figures }) => {
    const first = make("div", { className: "card name" }, make("bdi", { text: name }));
    first.style.setProperty("--swatch", color);
    const others = figures.map(([label, value, more]) => {
      const card = make("div", { className: "card" }, make("b", { text: value }), make("span", { text: label }));
      if (more) card.append(make("small", { text: more }));
      return card;
    });
    return make("div", { className: "cards" }, first, ...others);
  }));
}

export const swatch = (color) => {
  const made = make("span", { className: "swatch" });
  made.style.background = color;
  return made;
};

// A range with a margin at both ends, so that marks there are not cut.
export const room = (values) => {
  const [least, most] = [Math.min(...values), Math.max(...values)];
  const more = Math.max((most - least) * 0.025, 1);
  return [least - more, most + more];
};

// The title of a panel, above its left end.
export const heading = (text, top) => ({ text, x: 0, y: top, xref: "paper", yref: "paper", xanchor: "left", yanchor: "bottom", showarrow: false, font: { size: 13, color: "#17212b" } });

// A pattern that distinguishes bars in addition to their colour.
export const pattern = (shape) => ({ shape, fillmode: "overlay", fgcolor: "#fff", size: 8, solidity: 0.22 });

// Draws or updates a chart; keeps its zoom.
export function chart(place, traces, layout) {
  const axis = { tickfont: { size: 12 }, title: { font: { size: 13 } }, gridcolor: "#e6ebf0", zerolinecolor: "#c3ccd4", linecolor: "#b5c0ca", automargin: true };
  const axes = Object.fromEntries(Object.entries(layout).filter(([key]) => /^[xy]axis/.test(key)).map(([key, value]) => [key, { ...axis, ...value, title: { ...axis.title, ...value.title } }]));
  const looks = {
    font: { family: "system-ui, DejaVu Sans, sans-serif", size: 13, color: "#17212b" },
    margin: { l: 62, r: 20, t: 48, b: 46 }, paper_bgcolor: "#fff", plot_bgcolor: "#fff", uirevision: "stay",
    hoverlabel: { align: "left", namelength: -1 }, legend: { orientation: "h", x: 1, xanchor: "right", y: 1.01, yanchor: "bottom" }, ...layout, ...axes,
  };
  const config = { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };
  return window.Plotly.react(place, traces, looks, config);
}

async function showState() {
  const states = await question("states");
  if (!runs.length) {
    if (states.length) location.reload();
    return;
  }
  const running = states.filter((state) => !state.finished);
  const place = element("state");
  const last = Math.round(Math.min(...running.map((state) => state.seconds)));
  place.className = last < STILL ? "live" : ""; // without a commit for long, it may have been killed
  place.textContent = running.length ? `not finished, last commit ${last < 120 ? `${last} s` : `${Math.round(last / 60)} min`} ago` : "finished";
}

showState().catch(() => {});
setInterval(() => document.hidden || showState().catch(() => {}), EVERY);

// Shared parts of the pages: requests to the server, errors, tables, and the style of charts.

const dark = matchMedia("(prefers-color-scheme: dark)");
dark.addEventListener("change", () => location.reload()); // charts are drawn with the colours of their time

// The colours of page.css, which has a light and a dark set.
const sheet = getComputedStyle(document.documentElement);
export const colorOf = (name) => sheet.getPropertyValue(`--${name}`).trim();
export const narrow = () => innerWidth < 640;

// Okabe and Ito's colours for lines, each with its own dash and marker.
export const STYLES = [
  { color: colorOf("blue"), dash: "solid", symbol: "circle" },
  { color: colorOf("red"), dash: "dash", symbol: "square" },
  { color: colorOf("green"), dash: "dot", symbol: "diamond" },
  { color: colorOf("pink"), dash: "dashdot", symbol: "triangle-up" },
  { color: colorOf("amber"), dash: "longdash", symbol: "triangle-down" },
  { color: colorOf("sky"), dash: "longdashdot", symbol: "pentagon" },
  { color: colorOf("ink"), dash: "solid", symbol: "x" },
  { color: colorOf("grey"), dash: "dash", symbol: "star" },
];
export const style = (number) => STYLES[number % STYLES.length];
export const runs = JSON.parse(document.body.dataset.runs);
export const element = (id) => document.getElementById(id);

const EVERY = 2000; // milliseconds between two requests for a running run
const etags = new Map();
const problems = new Map();
let loops = 0;

// Errors of a request by the user, and of the periodic requests of the page; one does not hide the other.
export function problem(message, source = "person") {
  problems.set(source, message);
  const place = element("problem");
  place.textContent = [...problems.values()].filter(Boolean).join("\n");
  place.hidden = !place.textContent;
}

// The response to a request; undefined if it has not changed. Throws an Error with the server's message.
export async function question(path, { parameters = {}, names = runs, again = false } = {}) {
  const query = new URLSearchParams(parameters);
  names.forEach((name) => query.append("run", name));
  const url = `/api/${path}?${query}`;
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
  const loop = `page ${loops++}`; // an error of one loop stays while another one succeeds
  const tick = (again) => {
    pending += 1;
    turn = turn.then(async () => {
      try {
        await step(again);
        problem("", loop);
      } catch (error) {
        problem(error.message, loop);
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

// Runs `step` when nothing was typed for a moment.
export function later(step) {
  let typing;
  return () => {
    clearTimeout(typing);
    typing = setTimeout(step, 300);
  };
}

const count = new Intl.NumberFormat("en");
export const whole = (value) => (value === null || value === undefined ? "–" : count.format(value));
export const fixed = (digits) => (value) => (value === null || value === undefined ? "–" : Number(value).toFixed(digits));
export const signed = (digits) => (value) => (value === null || value === undefined ? "–" : (value > 0 ? "+" : "") + Number(value).toFixed(digits));
export const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)}%`);

// An acceptance rate with its interval and count, of a row that the server computed with store/query/rates.py.
export function interval({ acceptance, low, high, judged }) {
  if (acceptance === null || acceptance === undefined) return make("small", { text: "nothing judged" });
  const range = make("small", { text: ` ${fixed(2)(low)}–${fixed(2)(high)} of ${whole(judged)}`, title: "interval of 95%, and judged tokens" });
  return make("span", {}, make("b", { text: fixed(3)(acceptance) }), range);
}

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

// Columns are { title, of: row => value, by: row => what rows are sorted by, show: value => text, number, text, code, short };
// the last four choose a style. A click on a title sorts the rows by it, a second one the other way, a third one not.
export function table(place, columns, rows, caption) {
  const kind = (column) => ["number", "code", "text", "short"].find((name) => column[name]) ?? "";
  const chosen = columns.find((column) => column.title && column.title === place.dataset.sortedBy);
  const head = make("tr", {}, ...columns.map((column, index) => {
    const made = make("th", { className: kind(column), scope: "col" });
    if (!sortsBy(column, rows)) made.textContent = column.title;
    else made.append(sorter(place, column, rows, () => {
      table(place, columns, rows, caption);
      place.querySelectorAll("th")[index].firstChild.focus();
    }));
    if (column === chosen) made.setAttribute("aria-sort", place.dataset.order);
    return made;
  }));
  const ordered = chosen ? sorted(rows, chosen, place.dataset.order === "descending") : rows;
  const body = ordered.map((row) => make("tr", {}, ...columns.map((column) => cell(column, column.of(row), kind(column)))));
  const top = place.scrollTop;
  place.classList.remove("loading");
  place.replaceChildren(make("table", { "aria-label": caption }, make("thead", {}, head), make("tbody", {}, ...body)));
  if (!rows.length) place.append(make("p", { text: "Nothing yet.", className: "note" }));
  place.tabIndex = 0;
  place.scrollTop = top;
}

const valueBy = (column, row) => (column.by ?? column.of)(row);

// The kind of value that rows are sorted by: "number" or "string"; undefined if they cannot be sorted by this column.
function sortsBy(column, rows) {
  if (!column.title || rows.length < 2) return undefined;
  const kind = typeof rows.map((row) => valueBy(column, row)).find((value) => value !== null && value !== undefined);
  return kind === "number" || (kind === "string" && (column.by || !column.number)) ? kind : undefined;
}

function sorter(place, column, rows, redraw) {
  const made = make("button", { type: "button", className: "sorter", text: column.title, title: "sort" });
  made.addEventListener("click", () => {
    const { sortedBy, order } = place.dataset;
    const orders = sortsBy(column, rows) === "number" ? ["descending", "ascending"] : ["ascending", "descending"];
    const next = orders[sortedBy === column.title ? orders.indexOf(order) + 1 : 0];
    if (next) Object.assign(place.dataset, { sortedBy: column.title, order: next });
    else delete place.dataset.sortedBy;
    redraw();
  });
  return made;
}

// Rows without a value come last either way.
function sorted(rows, column, down) {
  const values = new Map(rows.map((row) => [row, valueBy(column, row) ?? null]));
  return rows.toSorted((one, other) => {
    const [first, second] = [values.get(one), values.get(other)];
    if (first === null || second === null) return (first === null) - (second === null);
    const order = typeof first === "number" ? first - second : first.localeCompare(second, "en", { numeric: true });
    return down ? -order : order;
  });
}

function cell(column, value, className) {
  const made = make("td", { className, dir: "auto", "data-title": column.title });
  if (value instanceof Node) made.append(value);
  else made.textContent = column.show ? column.show(value) : value ?? "–";
  return made;
}

export function cards(place, groups) {
  place.replaceChildren(...groups.map(({ name, color, metrics }) => {
    const first = make("div", { className: "card name" }, make("bdi", { text: name }));
    first.style.setProperty("--swatch", color);
    const others = metrics.map(([label, value, more]) => {
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

// What a page found about each run, in sentences, with the first as a headline if there is one.
// `compared` has sentences on all runs together.
export function story(place, stories, compared = [], headed = false) {
  const list = (sentences) => make("ul", {}, ...sentences.map((text) => make("li", { text })));
  const together = compared.length ? [make("div", {}, make("p", {}, make("b", { text: "The runs compared" })), list(compared))] : [];
  place.classList.remove("loading");
  place.replaceChildren(...together, ...stories.map(({ run, sentences }) => {
    const name = runs.length > 1 ? [swatch(style(runs.indexOf(run)).color), make("b", {}, make("bdi", { text: run })), ": "] : [];
    const head = headed ? [make("p", { text: sentences[0], className: "headline" })] : [];
    return make("div", {}, ...(name.length ? [make("p", {}, ...name.slice(0, 2))] : []), ...head, list(sentences.slice(head.length)));
  }));
}

// A range with a margin at both ends, so that marks there are not cut.
export const room = (values) => {
  const [least, most] = [Math.min(...values), Math.max(...values)];
  const more = Math.max((most - least) * 0.025, 1);
  return [least - more, most + more];
};

// The title of a panel, above its left end.
export const heading = (text, top) => ({ text, x: 0, y: top, xref: "paper", yref: "paper", xanchor: "left", yanchor: "bottom", showarrow: false, font: { size: 13, color: colorOf("ink") } });

// A pattern that distinguishes bars in addition to their colour.
export const pattern = (shape) => ({ shape, fillmode: "overlay", fgcolor: colorOf("paper"), size: 8, solidity: 0.22 });

// Draws or updates a chart; keeps its zoom.
export function chart(place, traces, layout) {
  const axis = { tickfont: { size: 12 }, title: { font: { size: 13 } }, gridcolor: colorOf("grid"), zerolinecolor: colorOf("edge"), linecolor: colorOf("edge"), automargin: true };
  const axes = Object.fromEntries(Object.entries(layout).filter(([key]) => /^[xy]axis/.test(key)).map(([key, value]) => [key, { ...axis, ...value, title: { ...axis.title, ...value.title } }]));
  const looks = {
    font: { family: "system-ui, DejaVu Sans, sans-serif", size: 13, color: colorOf("ink") },
    margin: narrow() ? { l: 44, r: 8, t: 48, b: 44 } : { l: 62, r: 20, t: 48, b: 46 }, paper_bgcolor: colorOf("paper"), plot_bgcolor: colorOf("paper"), uirevision: "stay",
    hoverlabel: { align: "left", namelength: -1, bgcolor: "#101b26", font: { color: "#f3f7fa" } }, legend: { orientation: "h", x: 1, xanchor: "right", y: 1.01, yanchor: "bottom" }, ...layout, ...axes,
  };
  place.classList.remove("loading");
  const config = { displaylogo: false, displayModeBar: narrow() ? false : "hover", responsive: true, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };
  return window.Plotly.react(place, traces, looks, config);
}

// In a narrow window the names of the pages scroll.
// Not scrollIntoView: it would also move the place from which the keyboard goes on.
for (const link of document.querySelectorAll("nav [aria-current]")) {
  const [nav, own, whole] = [link.parentElement, link.getBoundingClientRect(), link.parentElement.getBoundingClientRect()];
  nav.scrollLeft += own.left + own.width / 2 - whole.left - whole.width / 2;
}

async function showState() {
  const states = await question("states");
  if (!runs.length) {
    if (states.length) location.reload();
    return;
  }
  const open = states.filter((state) => state.activity !== "finished");
  const place = element("state");
  const last = Math.round(Math.min(...open.map((state) => state.seconds)));
  const running = open.some((state) => state.activity === "running");
  place.className = running ? "live" : "";
  const ago = last < 120 ? `${last} s` : last < 7200 ? `${Math.round(last / 60)} min` : `${Math.round(last / 3600)} h`;
  place.textContent = open.length ? `${running ? "running" : "stopped"}, last commit ${ago} ago` : "finished";
}

showState().catch(() => {});
setInterval(() => document.hidden || showState().catch(() => {}), EVERY);

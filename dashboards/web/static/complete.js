// Completion of the names of views and columns, and of words of SQL, in a text area. Nothing is chosen until a key is
// pressed: Tab takes the first name, the arrow keys choose another, Escape closes the list.
import { make } from "./common.js";

const WORDS = ["SELECT", "FROM", "WHERE", "GROUP BY ALL", "ORDER BY", "HAVING", "LIMIT", "JOIN", "USING", "WITH", "FILTER", "OVER", "PARTITION BY", "DISTINCT", "BETWEEN", "CASE WHEN", "DESC",
  "count(*)", "sum(", "avg(", "min(", "max(", "median(", "quantile_cont(", "text_of(", "nullif(", "coalesce(", "any_value(", "arg_max(", "row_number()"];
const RESERVED = ["offset", "index"];
const MOST = 8;

export const quoteName = (name) => (RESERVED.includes(name) ? `"${name}"` : name);

// The views that a query names, by themselves and by their aliases.
function namedViews(query, views) {
  const found = new Map();
  for (const [, view, alias] of query.matchAll(/\b(?:from|join)\s+(\w+)(?:\s+(?:as\s+)?(?!where|group|order|join|using|on|limit|left|inner|asof|having|qualify|window\b)(\w+))?/gi)) {
    if (!views.has(view)) continue;
    found.set(view, view);
    if (alias) found.set(alias, view);
  }
  return found;
}

// Names that may follow `before`, those of the query's own views first; `start` is where the name begins.
export function suggest(query, caret, views) {
  const [, owner, quote, word] = query.slice(0, caret).match(/(?:(\w+)\.)?("?)(\w*)$/);
  const start = caret - word.length - quote.length;
  const named = namedViews(query, views);
  const columnsOf = (view) => (views.get(view) ?? []).map(({ name, type }) => ({ text: quoteName(name), name, about: `${type}, ${view}` }));
  const own = [...new Set(named.values())].flatMap(columnsOf);
  const all = owner ? columnsOf(named.get(owner) ?? owner) : [
    ...own, ...[...views.keys()].map((name) => ({ text: name, name, about: "view" })), ...[...views.keys()].flatMap(columnsOf),
    ...(quote ? [] : WORDS.map((text) => ({ text, name: text, about: "SQL" }))),
  ];
  const wanted = word.toLowerCase();
  const distinct = all.filter((one, place) => all.findIndex((other) => other.text === one.text) === place && one.name.toLowerCase() !== wanted);
  const isOwn = (one) => own.includes(one);
  const begins = distinct.filter(({ name }) => name.toLowerCase().startsWith(wanted)).sort((one, other) => isOwn(other) - isOwn(one) || one.name.length - other.name.length);
  const holds = wanted.length > 1 ? distinct.filter(({ name }) => !begins.some((one) => one.name === name) && name.toLowerCase().includes(wanted)) : [];
  return { start, isOpen: Boolean(word || owner || quote), found: [...begins, ...holds].slice(0, MOST) };
}

// The place of the caret in the window of a text area: that of a mark in an element of the same text and style.
function placeOf(area, caret) {
  const copy = make("div", { className: "caret-mirror", "aria-hidden": "true" });
  const looks = getComputedStyle(area);
  ["font", "padding", "border", "lineHeight", "width", "boxSizing", "tabSize"].forEach((name) => { copy.style[name] = looks[name]; });
  copy.textContent = area.value.slice(0, caret);
  const mark = copy.appendChild(make("span", { text: "\u200b" }));
  area.parentElement.append(copy);
  const place = { left: mark.offsetLeft - area.scrollLeft, top: mark.offsetTop + mark.offsetHeight - area.scrollTop };
  copy.remove();
  return { left: area.offsetLeft + place.left, top: area.offsetTop + Math.min(place.top, area.clientHeight) };
}

// Completes names in `area` with `list`, an element of the same parent. `views` has the columns of each view.
export function complete(area, list, status, views) {
  let shown = null;
  let chosen = -1;

  const close = () => {
    shown = null;
    chosen = -1;
    list.hidden = true;
    status.textContent = "";
    area.removeAttribute("aria-activedescendant");
  };
  const choose = (next) => {
    chosen = (next + shown.found.length) % shown.found.length;
    [...list.children].forEach((item, place) => item.setAttribute("aria-selected", String(place === chosen)));
    area.setAttribute("aria-activedescendant", `name-${chosen}`);
    list.children[chosen].scrollIntoView({ block: "nearest" });
  };
  const accept = (which) => {
    const { start, found } = shown;
    const closing = area.value[area.selectionStart] === '"' && found[which].text.endsWith('"') ? 1 : 0;
    area.setRangeText(found[which].text, start, area.selectionStart + closing, "end");
    close();
    area.focus();
  };
  const open = (force) => {
    const caret = area.selectionStart;
    shown = suggest(area.value, caret, views);
    if (!shown.found.length || !(force || shown.isOpen) || area.selectionEnd !== caret) return close();
    chosen = -1;
    list.replaceChildren(...shown.found.map(({ text, about }, place) => {
      const item = make("li", { id: `name-${place}`, role: "option", "aria-selected": "false" }, make("code", { text }), make("small", { text: about }));
      item.addEventListener("pointerdown", (event) => { event.preventDefault(); accept(place); });
      return item;
    }));
    const { left, top } = placeOf(area, caret);
    list.hidden = false;
    list.style.top = `${top}px`;
    list.style.left = `${Math.max(0, Math.min(left, area.offsetLeft + area.offsetWidth - list.offsetWidth))}px`;
    status.textContent = `${shown.found.length} names: Tab completes, arrow keys choose, Esc closes`;
    return undefined;
  };

  area.addEventListener("input", () => open(false));
  area.addEventListener("blur", close);
  area.addEventListener("click", close);
  area.addEventListener("keydown", (event) => {
    if (event.ctrlKey && event.key === " ") { event.preventDefault(); open(true); return; }
    if (!shown || event.ctrlKey || event.metaKey || event.altKey) { if (event.key === "Enter") close(); return; }
    if (event.key === "Escape") close();
    else if (event.key === "ArrowDown") choose(chosen + 1);
    else if (event.key === "ArrowUp") choose(chosen < 0 ? -1 : chosen - 1);
    else if (event.key === "Tab" && !event.shiftKey) accept(Math.max(chosen, 0));
    else if (event.key === "Enter" && chosen >= 0) accept(chosen);
    else {
      if (["ArrowLeft", "ArrowRight", "Home", "End"].includes(event.key)) close();
      return;
    }
    event.preventDefault();
  });
}

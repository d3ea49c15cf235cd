// A list of prompts, and the text of one, token by token.
import { element, fixed, later, live, make, problem, question, runs, whole } from "./common.js";

const form = element("choices");
const article = element("completion");
const detail = element("detail");
const run = runs.slice(0, 1);
const rival = runs[1]; // of which the same prompt is shown next to it
const PAGE = 20; // prompts, as the server sends them
let page = 0;
let opened = null;
let active = null;
let reached = null; // the rejection that was shown last

const settings = () => ({ order: form.elements.order.value, dataset: form.elements.dataset.value, search: form.elements.search.value.trim(), page });

function item(prompt) {
  const facts = make("small", {}, make("b", { text: `#${whole(prompt.offset)}` }), make("bdi", { text: prompt.dataset }),
    make("span", { text: `acceptance ${fixed(2)(prompt.acceptance)}` }), make("span", { text: `${fixed(0)(prompt.speed)} tok/s` }));
  const button = make("button", { type: "button" }, facts, make("span", { text: prompt.start || "(no text kept)", dir: "auto" }));
  button.dataset.offset = prompt.offset;
  button.addEventListener("click", () => open(prompt.offset));
  if (prompt.offset === opened) button.setAttribute("aria-current", "true");
  return make("li", {}, button);
}

function showList(found) {
  const focused = document.activeElement?.dataset?.offset;
  element("prompts").replaceChildren(...found.prompts.map(item));
  if (focused) element("prompts").querySelector(`[data-offset="${focused}"]`)?.focus();
  if (!found.prompts.length) element("prompts").append(make("li", { text: "No prompts here.", className: "note" }));
  element("page").textContent = `page ${page + 1}`;
  element("before").disabled = page === 0;
  element("next").disabled = found.prompts.length < found.page_size;
  const datasets = form.elements.dataset;
  const known = [...datasets.options].map((option) => option.value);
  found.datasets.filter((row) => !known.includes(row.dataset)).forEach((row) => datasets.add(new Option(row.dataset, row.dataset)));
  if (opened === null && found.prompts.length) open(found.prompts[0].offset);
}

async function open(offset) {
  opened = offset; // set at once, so that the last request is shown in whatever order responses arrive
  try {
    const content = await question("completion", { names: run, parameters: { offset } });
    const other = rival && await question("completion", { names: [rival], parameters: { offset } }).catch(() => "");
    if (opened !== offset) return;
    article.replaceChildren(textOf(content, "own", run[0]), ...(rival ? [textOf(other, "rival", rival)] : []));
    article.classList.toggle("two", Boolean(rival));
    if (rival) keepSame(...article.children);
    reached = null;
    form.elements.offset.value = offset;
    hideDetail();
    const address = new URL(location.href);
    address.searchParams.set("offset", offset);
    history.replaceState(null, "", address);
    element("prompts").querySelectorAll("button").forEach((button) => {
      if (Number(button.dataset.offset) === offset) button.setAttribute("aria-current", "true");
      else button.removeAttribute("aria-current");
    });
    problem("");
  } catch (error) {
    problem(error.message);
  }
}

// The server escapes every text and sends no scripts; the content security policy would not run them.
function textOf(content, className, name) {
  const made = make("div", { className });
  made.innerHTML = content;
  if (rival) made.prepend(make("h2", { className: "of" }, make("bdi", { text: name })));
  return made;
}

// Two runs can be compared where they read the same prompt at the same place of their streams.
function keepSame(own, other) {
  const [one, two] = [own, other].map((part) => ["h2 small", "h3 + .prompt"].map((place) => part.querySelector(place)?.textContent).join("\n"));
  if (one !== two) other.replaceChildren(other.firstChild, make("p", { className: "note", text: "This run has another prompt here, or none." }));
}

function showDetail(token) {
  if (!token?.dataset.detail) return hideDetail();
  hideDetail();
  active = token;
  token.classList.add("active");
  detail.textContent = token.dataset.detail;
  detail.classList.toggle("wide", token.classList.contains("tree"));
  detail.hidden = false;
  const place = token.getClientRects()[0];
  const below = place.bottom + 8 + detail.offsetHeight < innerHeight;
  detail.style.left = `${Math.max(8, Math.min(place.left, innerWidth - detail.offsetWidth - 12))}px`;
  detail.style.top = `${below ? place.bottom + 8 : Math.max(8, place.top - detail.offsetHeight - 8)}px`;
}

function hideDetail() {
  active?.classList.remove("active");
  active = null;
  detail.hidden = true;
}

const STEPS = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -Infinity, End: Infinity };

// Arrow keys move along the visible tokens; Escape closes the details.
function moved(event) {
  if (event.key === "Escape") return hideDetail();
  if (!(event.key in STEPS) || !event.target.classList.contains("tokens")) return;
  event.preventDefault();
  const tokens = [...event.target.querySelectorAll(".t")].filter((token) => token.getClientRects().length);
  if (!tokens.length) return;
  const now = tokens.indexOf(active);
  const next = tokens[Math.max(0, Math.min(tokens.length - 1, now < 0 ? 0 : now + STEPS[event.key]))];
  next.scrollIntoView({ block: "nearest" });
  showDetail(next);
}

// The next rejected token: of this completion after the one reached before, or else of the next prompt that has one.
async function nextRejection() {
  const tokens = [...article.querySelectorAll(".own .tokens .t")];
  const rejected = tokens.slice(tokens.indexOf(reached) + 1).find((token) => token.classList.contains("rejected"));
  if (rejected) return showRejection(rejected);
  try {
    const { offset } = await question("rejection", { names: run, parameters: { offset: opened ?? -1 } });
    if (offset === null) {
      element("where").textContent = "No prompt after this one has a rejection.";
      return undefined;
    }
    await open(offset);
    return showRejection(article.querySelector(".own .tokens .t.rejected"));
  } catch (error) {
    return problem(error.message);
  }
}

async function copyAnswer() {
  const answer = article.querySelector(".own .answer .prompt");
  if (!answer) return problem("The log of this run keeps no text, or no prompt is open.");
  await navigator.clipboard.writeText(answer.textContent);
  element("where").textContent = `Copied ${whole(answer.textContent.length)} characters.`;
  return problem("");
}

function showRejection(token) {
  reached = token;
  if (!token) return;
  element("show-rejected").checked = true;
  article.classList.remove("hide-rejected");
  token.scrollIntoView({ block: "center" });
  element("where").textContent = `Prompt ${whole(opened)}`;
  setTimeout(() => showDetail(token), 60); // scrolling hides details
}

if (runs.length) {
  const address = new URLSearchParams(location.search);
  if (address.get("offset")) {
    page = Math.floor(Number(address.get("offset")) / PAGE);
    open(Number(address.get("offset")));
  }
  const { now } = live(async (again) => {
    const found = await question("prompts", { names: run, parameters: settings(), again });
    if (found) showList(found);
  });
  element("next-rejection").addEventListener("click", nextRejection);
  element("copy").addEventListener("click", () => copyAnswer().catch((error) => problem(error.message)));
  addEventListener("keydown", (event) => {
    if (event.key === "n" && !event.ctrlKey && !event.metaKey && !event.altKey && !event.target.closest("input, select, textarea")) nextRejection();
  });
  form.elements.search.addEventListener("input", later(() => { page = 0; now(); }));
  form.addEventListener("change", (event) => {
    if (["offset", "search"].includes(event.target.name)) return;
    page = 0;
    opened = null;
    now();
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (form.elements.offset.value !== "") open(Number(form.elements.offset.value));
  });
  element("before").addEventListener("click", () => { page -= 1; now(); });
  element("next").addEventListener("click", () => { page += 1; now(); });
  for (const name of ["rejected", "dropped", "trees", "blocks"]) {
    const box = element(`show-${name}`);
    const apply = () => article.classList.toggle(`hide-${name}`, !box.checked);
    box.addEventListener("change", apply);
    apply();
  }
  article.addEventListener("mouseover", (event) => showDetail(event.target.closest(".tokens .t")));
  article.addEventListener("mouseleave", hideDetail);
  article.addEventListener("keydown", moved);
  article.addEventListener("focusout", hideDetail);
  addEventListener("scroll", hideDetail, { passive: true });
}

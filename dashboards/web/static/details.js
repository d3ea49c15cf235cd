// The parts of the page: what each found, in sentences; a part that has nothing to show stays hidden.
import { live, question, story } from "./common.js";

const FOUND = { policies: "policies", memory: "sources", ngrams: "paying", calibration: "bins", vocabulary: "pairs" };

document.querySelectorAll("[data-part]").forEach((part) => live(async (again) => {
  const found = await question(part.dataset.part, { again });
  if (!found) return;
  part.hidden = !found[FOUND[part.dataset.part]].length;
  story(part.querySelector(".story"), found.story);
}));

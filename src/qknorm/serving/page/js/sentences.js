// The translation, sentence by sentence: words that light up with those they came from, and the one that is chosen.

import { byId, make } from "./elements.js";

const output = byId("output");
const backdrop = byId("backdrop");
const source = byId("source");

/** What is shown: the text that was sent, its sentences with their places in it, and the chosen one. */
export const shown = { text: "", sentences: [], chosen: -1 };

let end = 0;
let tell = () => {};
let tellOfLight = () => {};

/** Calls `listener` with a sentence, or null, whenever another one is chosen. */
export function onChoice(listener) {
  tell = listener;
}

/** Calls `listener` with the sentence, or null, and the words on both sides that are lit up. */
export function onHighlight(listener) {
  tellOfLight = listener;
}

export function begin(text) {
  Object.assign(shown, { text, sentences: [], chosen: -1 });
  end = 0;
  output.replaceChildren();
  output.classList.remove("old");
  highlight(null);
  tell(null);
}

/** Adds the next sentence as the server sent it. */
export function add(sentence) {
  const start = end + sentence.before.length;
  end = start + sentence.source.length;
  const entry = { ...sentence, start, used: 0, element: null };
  const at = shown.sentences.push(entry) - 1;
  entry.element = make("span", { className: "sentence fresh", tabIndex: 0, role: "button", "aria-pressed": "false" });
  entry.element.dataset.at = at;
  fill(entry);
  output.append(sentence.space, entry.element);
}

export function finish(after) {
  output.append(after);
}

/** The whole translation as text, with the alternatives that were chosen. */
export function wholeText() {
  return output.textContent;
}

/** Puts another of its alternatives in the place of a sentence. */
export function useAlternative(entry, rank) {
  entry.used = rank;
  fill(entry);
}

function fill(entry) {
  const text = entry.alternatives[entry.used].text;
  const words = text.split(/(\s+)/).filter(Boolean);
  let number = 0;
  const parts = words.map((word) => (word.trim() ? make("span", { className: "word" }, word) : word));
  for (const part of parts) if (part.dataset) part.dataset.word = number++;
  entry.element.replaceChildren(...parts);
}

export function choose(at) {
  if (shown.chosen === at) return;
  shown.sentences[shown.chosen]?.element.setAttribute("aria-pressed", "false");
  shown.chosen = at;
  shown.sentences[at]?.element.setAttribute("aria-pressed", "true");
  tell(shown.sentences[at] ?? null);
}

// ---------------------------------------------------------------- words and where they came from

/** The source words that a target word came from; of alternatives other than the best nothing is known. */
export function originsOf(entry, target) {
  return entry.used ? [] : (entry.alignment ?? []).filter((link) => link[1] === target).map((link) => link[0]);
}

export function goalsOf(entry, word) {
  return entry.used ? [] : (entry.alignment ?? []).filter((link) => link[0] === word).map((link) => link[1]);
}

/** Lights up words of a sentence on both sides; nothing if there is no sentence. */
export function highlight(entry, sources = [], targets = []) {
  for (const word of output.querySelectorAll(".word.here")) word.classList.remove("here");
  backdrop.replaceChildren();
  tellOfLight(entry, sources, targets);
  if (!entry || source.value !== shown.text) return;
  for (const target of targets) entry.element.querySelector(`[data-word="${target}"]`)?.classList.add("here");
  const mark = make("mark");
  let place = -1;
  for (const part of entry.source.split(/(\s+)/)) {
    if (part.trim()) place += 1;
    mark.append(part.trim() && sources.includes(place) ? make("mark", {}, part) : part);
  }
  const before = shown.text.slice(0, entry.start);
  backdrop.append(before, mark, shown.text.slice(entry.start + entry.source.length), "\n");
  backdrop.scrollTop = source.scrollTop;
}

function point(event) {
  const element = event.target.closest?.(".sentence");
  const entry = element && shown.sentences[element.dataset.at];
  const word = event.target.closest?.(".word");
  if (!entry) return highlight(null);
  const target = word ? Number(word.dataset.word) : null;
  highlight(entry, target === null ? [] : originsOf(entry, target), target === null ? [] : [target]);
}

/** Arrow keys go from word to word of the sentence that has the focus; Enter and space choose it. */
function key(event) {
  const element = event.target.closest(".sentence");
  const entry = element && shown.sentences[element.dataset.at];
  if (!entry) return;
  if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    return choose(Number(element.dataset.at));
  }
  const ahead = output.dir === "rtl" ? -1 : 1;
  const step = { ArrowLeft: -ahead, ArrowRight: ahead }[event.key];
  if (!step) return;
  event.preventDefault();
  const count = element.querySelectorAll(".word").length;
  const now = element.querySelector(".word.here")?.dataset.word;
  const target = Math.max(0, Math.min(count - 1, now === undefined ? 0 : Number(now) + step));
  highlight(entry, originsOf(entry, target), [target]);
}

export function setUp() {
  output.addEventListener("pointerover", point);
  output.addEventListener("pointerleave", () => highlight(null));
  output.addEventListener("keydown", key);
  output.addEventListener("focusout", () => highlight(null));
  output.addEventListener("click", (event) => {
    const element = event.target.closest(".sentence");
    if (element) choose(Number(element.dataset.at));
  });
  source.addEventListener("scroll", () => { backdrop.scrollTop = source.scrollTop; });
}

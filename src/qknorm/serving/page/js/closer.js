// One sentence looked at closely: its words side by side, its alternatives, and the attention behind it.

import { lookAt } from "./api.js";
import { byId, make } from "./elements.js";
import { goalsOf, highlight, onChoice, onHighlight, originsOf, useAlternative } from "./sentences.js";

const SVG = "http://www.w3.org/2000/svg";
const card = byId("closer");
const details = byId("attention");
const frame = byId("attention-frame");
let pair = null;
let entry = null;
let asking = null;

export function usePair(chosen) {
  pair = chosen;
}

function show(sentence) {
  entry = sentence;
  card.hidden = !entry;
  asking?.abort();
  frame.hidden = true;
  if (!entry) return;
  fillLinks();
  fillAlternatives();
  if (details.open) showAttention();
}

// ---------------------------------------------------------------- words

function fillLinks() {
  const of = (words, light) =>
    words.map((word, at) => {
      const now = () => light(at);
      return make("button", { type: "button", className: "word", onpointerenter: now, onfocus: now, onclick: now }, word);
    });
  const targets = entry.element.textContent.split(/\s+/).filter(Boolean);
  const fromSource = of(entry.source_words ?? [], (at) => highlight(entry, [at], goalsOf(entry, at)));
  const fromTarget = of(targets, (at) => highlight(entry, originsOf(entry, at), [at]));
  byId("links").replaceChildren(
    make("p", { dir: pair.source_direction, lang: pair.source }, ...fromSource),
    make("p", { dir: pair.target_direction, lang: pair.target }, ...fromTarget),
    document.createElementNS(SVG, "svg"),
  );
  drawLinks();
}

/** A curve for every link, where both lines of words are single lines. */
function drawLinks() {
  const box = byId("links");
  if (!entry || box.children.length < 3) return;
  const [above, below, picture] = box.children;
  const frame = box.getBoundingClientRect();
  const isOneLine = (line) => new Set([...line.children].map((word) => word.offsetTop)).size < 2;
  box.classList.toggle("wrapped", !isOneLine(above) || !isOneLine(below));
  const middle = (word) => word.offsetLeft + word.offsetWidth / 2;
  const [top, bottom] = [above.getBoundingClientRect().bottom - frame.top + 1, below.getBoundingClientRect().top - frame.top - 1];
  const known = (entry.used ? [] : entry.alignment ?? []).filter(([s, t]) => above.children[s] && below.children[t]);
  picture.replaceChildren(
    ...known.map(([s, t]) => {
      const path = document.createElementNS(SVG, "path");
      const [from, to, half] = [middle(above.children[s]), middle(below.children[t]), (top + bottom) / 2];
      path.setAttribute("d", `M${from} ${top}C${from} ${half} ${to} ${half} ${to} ${bottom}`);
      Object.assign(path.dataset, { source: s, target: t });
      return path;
    }),
  );
}

/** Lights up the same words here as in the text above. */
function lightUp(lit, sources, targets) {
  const [above, below, picture] = byId("links").children;
  if (!picture) return;
  const mine = lit === entry;
  [...above.children].forEach((word, at) => word.classList.toggle("here", mine && sources.includes(at)));
  [...below.children].forEach((word, at) => word.classList.toggle("here", mine && targets.includes(at)));
  for (const path of picture.children) {
    const both = sources.includes(Number(path.dataset.source)) && targets.includes(Number(path.dataset.target));
    path.classList.toggle("here", mine && both);
  }
}

// ---------------------------------------------------------------- alternatives

function fillAlternatives() {
  const items = entry.alternatives.map(({ text, score }, rank) => {
    const bar = make("i");
    bar.style.width = `${100 * Math.exp((score ?? -99) - (entry.alternatives[0].score ?? 0))}%`;
    const words = make("span", { lang: pair.target }, text);
    const number = make("small", { title: "score", dir: "ltr" }, score === null ? "–" : score.toFixed(2));
    const use = () => {
      useAlternative(entry, rank);
      fillLinks();
      for (const button of byId("alternatives").querySelectorAll("button")) {
        button.setAttribute("aria-pressed", button === chooser);
      }
    };
    const chooser = make("button", { type: "button", dir: pair.target_direction, onclick: use, "aria-pressed": rank === entry.used }, words, number, bar);
    return make("li", {}, chooser);
  });
  byId("alternatives").replaceChildren(...items);
}

// ---------------------------------------------------------------- attention

async function showAttention() {
  const status = byId("attention-status");
  asking?.abort();
  asking = new AbortController();
  status.textContent = "Looking …";
  frame.hidden = true;
  try {
    const { address } = await lookAt(entry.source, pair.name, asking.signal);
    frame.onload = fitFrame;
    frame.src = address;
    frame.hidden = false;
    status.textContent = "";
  } catch (error) {
    if (error.name !== "AbortError") status.textContent = error.message;
  }
}

/** Gives the page inside the height it needs and the theme of this one. */
function fitFrame() {
  const inside = frame.contentDocument;
  const button = inside?.getElementById("theme");
  if (!button) return;
  const dark = getComputedStyle(document.documentElement).colorScheme === "dark";
  if ((button.getAttribute("aria-pressed") === "true") !== dark) button.click();
  button.hidden = true;
  const fit = () => { frame.style.height = `${inside.documentElement.offsetHeight}px`; };
  new ResizeObserver(fit).observe(inside.documentElement);
  fit();
}

export function setUp() {
  onChoice(show);
  onHighlight(lightUp);
  byId("links").addEventListener("pointerleave", () => highlight(null));
  new ResizeObserver(drawLinks).observe(byId("links"));
  details.addEventListener("toggle", () => {
    if (details.open && entry) showAttention();
  });
  document.addEventListener("themechange", () => {
    if (!frame.hidden) fitFrame();
  });
}

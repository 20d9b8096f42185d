// Puts the page together: languages, theme, key, and text that is translated while it is typed.

import { hasKey, listPairs, translate, useKey } from "./api.js";
import * as closer from "./closer.js";
import { byId, counted, make, showProblem } from "./elements.js";
import * as files from "./files.js";
import * as sentences from "./sentences.js";

const PAUSE = 450; // milliseconds without a key before what was typed is translated
const ALTERNATIVES = 4;
const source = byId("source");
const status = byId("status");
let pairs = [];
let pair = null;
let limits = null;
let work = null;
let timer = null;

// ---------------------------------------------------------------- remembered choices

function remember(what, value) {
  try {
    localStorage.setItem(`qknorm.${what}`, value);
  } catch {
    // a browser that keeps nothing forgets the choice, and no more
  }
}

function recall(what) {
  try {
    return localStorage.getItem(`qknorm.${what}`);
  } catch {
    return null;
  }
}

function setUpTheme() {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const show = () => {
    byId("theme").setAttribute("aria-pressed", dark());
    document.dispatchEvent(new Event("themechange"));
  };
  if (["light", "dark"].includes(recall("theme"))) root.dataset.theme = recall("theme");
  byId("theme").addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    remember("theme", root.dataset.theme);
    show();
  });
  system.addEventListener("change", show);
  show();
}

// ---------------------------------------------------------------- languages

function languageName(code) {
  try {
    return new Intl.DisplayNames(["en"], { type: "language" }).of(code);
  } catch {
    return code;
  }
}

function fillPairs() {
  const label = ({ name, source, target }) => {
    const number = name.slice(`${source}-${target}`.length).slice(1);
    return `${languageName(source)} → ${languageName(target)}${number ? ` (${number})` : ""}`;
  };
  byId("pair").replaceChildren(...pairs.map((each) => make("option", { value: each.name }, label(each))));
  choosePair(pairs.find((each) => each.name === recall("pair")) ?? pairs[0]);
}

function reverseOf({ source, target }) {
  return pairs.find((each) => each.source === target && each.target === source);
}

function choosePair(chosen) {
  pair = chosen;
  byId("pair").value = pair.name;
  byId("swap").hidden = !reverseOf(pair);
  byId("source-name").textContent = languageName(pair.source);
  byId("target-name").textContent = languageName(pair.target);
  for (const element of [source, byId("backdrop")]) Object.assign(element, { dir: pair.source_direction, lang: pair.source });
  Object.assign(byId("output"), { dir: pair.target_direction, lang: pair.target });
  closer.usePair(pair);
}

// ---------------------------------------------------------------- translation

function schedule() {
  showCount();
  clearTimeout(timer);
  work?.abort();
  setBusy(true);
  byId("output").classList.add("old");
  sentences.highlight(null);
  timer = setTimeout(translateNow, PAUSE);
}

function showCount() {
  const length = [...source.value].length;
  const over = limits && length > limits.characters;
  byId("count").textContent = !length ? "" : over ? `${counted(length, "character")}: more than ${limits.characters.toLocaleString()}` : counted(length, "character");
  byId("clear").hidden = !length;
}

async function translateNow() {
  clearTimeout(timer);
  work?.abort();
  const mine = (work = new AbortController());
  const text = source.value;
  showProblem(null);
  sentences.begin(text);
  byId("copy").hidden = true;
  status.textContent = "";
  byId("progress").hidden = true;
  if (!text.trim() || !pair) return setBusy(false);
  setBusy(true);
  status.textContent = "Translating …";
  try {
    await receive(text, mine.signal);
    byId("copy").hidden = !navigator.clipboard || !sentences.shown.sentences.length;
  } catch (error) {
    if (error.name === "AbortError") return;
    status.textContent = "";
    report(error);
  }
  if (work !== mine) return;
  byId("progress").hidden = true;
  setBusy(false);
}

function setBusy(busy) {
  byId("output").setAttribute("aria-busy", busy);
}

async function receive(text, signal) {
  const began = performance.now();
  const asked = { text, pair: pair.name, nbest: Math.min(ALTERNATIVES, limits.beam), alignment: true };
  let [total, done] = [0, 0];
  for await (const line of translate(asked, signal)) {
    signal.throwIfAborted();
    if (line.sentences !== undefined) total = line.sentences;
    if (line.sentence) {
      sentences.add(line.sentence);
      done += 1;
      if (total > 1) showProgress(done, total);
      if (done === 1) sentences.choose(0);
    }
    if (line.done) {
      sentences.finish(line.after[0]);
      status.textContent = `${counted(total, "sentence")} · ${((performance.now() - began) / 1000).toFixed(1)} s`;
    }
  }
}

function showProgress(done, total) {
  Object.assign(byId("progress"), { hidden: false, max: total, value: done });
  status.textContent = `${done} of ${counted(total, "sentence")}`;
}

function report(error) {
  if (error.status === 401) {
    byId("key-form").hidden = false;
    byId("key").focus();
    showProblem(hasKey() ? "The server does not take this key; try another." : null);
    return;
  }
  const wait = error.status === 429 && error.retryAfter ? ` (${error.retryAfter} s)` : "";
  showProblem(error.message + wait);
}

// ---------------------------------------------------------------- controls

function setUpControls() {
  source.addEventListener("input", schedule);
  byId("go").addEventListener("click", translateNow);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) translateNow();
  });
  byId("clear").addEventListener("click", () => {
    source.value = "";
    schedule();
    source.focus();
  });
  byId("copy").addEventListener("click", async () => {
    await navigator.clipboard.writeText(sentences.wholeText());
    byId("copy").textContent = "Copied";
    setTimeout(() => { byId("copy").textContent = "Copy"; }, 1500);
  });
  byId("pair").addEventListener("change", () => changePair(pairs.find((each) => each.name === byId("pair").value)));
  byId("swap").addEventListener("click", () => {
    source.value = sentences.wholeText() || source.value;
    changePair(reverseOf(pair));
  });
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    useKey(byId("key").value.trim());
    byId("key-form").hidden = true;
    start();
  });
}

function changePair(chosen) {
  choosePair(chosen);
  remember("pair", pair.name);
  showCount();
  translateNow();
}

async function start() {
  try {
    ({ pairs, limits } = await listPairs());
    fillPairs();
    showCount();
    await translateNow();
  } catch (error) {
    report(error);
  }
  document.documentElement.dataset.ready = "yes";
}

setUpTheme();
setUpControls();
sentences.setUp();
closer.setUp();
files.setUp((file) => pair && files.translateFile(file, pair, limits));
start();

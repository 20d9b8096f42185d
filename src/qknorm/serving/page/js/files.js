// A text file in, its translation out: sent in parts that the server takes, with progress.

import { Problem, translate } from "./api.js";
import { byId, counted } from "./elements.js";

const MOST_LINES = 60;
const MOST_TRIES = 30;
let work = null;

/** Translates a file, and offers the result for saving. */
export async function translateFile(file, pair, limits) {
  work?.abort();
  const mine = (work = new AbortController());
  const [status, link] = [byId("file-status"), byId("file-link")];
  byId("file-name").textContent = file.name;
  byId("file-card").hidden = false;
  byId("file-card").setAttribute("aria-busy", true);
  byId("file-stop").hidden = false;
  link.hidden = true;
  if (link.href) URL.revokeObjectURL(link.href);
  showShare(0, 1);
  try {
    const text = await readText(file);
    if (!text) throw new Problem(0, `${file.name} is empty; choose a file with text.`);
    const parts = cut(text, Math.floor(limits.characters / 2));
    const result = await translateParts(parts, pair, text.length, mine.signal);
    link.href = URL.createObjectURL(new Blob([result], { type: "text/plain;charset=utf-8" }));
    link.download = nameFor(file.name, pair.target);
    link.hidden = false;
    status.textContent = `${counted(result.split("\n").length - (result.endsWith("\n") ? 1 : 0), "line")} translated`;
  } catch (error) {
    status.textContent = error.name === "AbortError" ? "Stopped." : error.message;
  }
  if (work !== mine) return;
  byId("file-stop").hidden = true;
  byId("file-card").setAttribute("aria-busy", false);
}

async function readText(file) {
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    throw new Problem(0, `${file.name} is no text in UTF-8; save it as UTF-8 and try again.`);
  }
}

/** The text in parts of whole lines, within so many characters where lines allow. */
export function cut(text, most) {
  const parts = [];
  let lines = [];
  let size = 0;
  for (const line of text.match(/[^\n]*\n|[^\n]+$/g) ?? []) {
    if (lines.length && (size + line.length > most || lines.length >= MOST_LINES)) {
      parts.push(lines);
      [lines, size] = [[], 0];
    }
    lines.push(line);
    size += line.length;
  }
  return lines.length ? [...parts, lines] : parts;
}

async function translateParts(parts, pair, total, signal) {
  let [result, done] = ["", 0];
  for (const lines of parts) {
    result += await translateLines(lines, pair, signal, (share) => showShare(done + share, total));
    done += lines.join("").length;
    showShare(done, total);
  }
  return result;
}

/** A part of a file; waits when the server is busy, and halves what it finds too much. */
async function translateLines(lines, pair, signal, progress) {
  for (let tries = 1; ; tries++) {
    try {
      return await translateOnce(lines.join(""), pair, signal, progress);
    } catch (error) {
      if (error.status === 413 && lines.length > 1) break;
      if (error.status !== 429 || tries >= MOST_TRIES) throw error;
      await pause(1000 * (error.retryAfter ?? 1), signal);
    }
  }
  const middle = Math.ceil(lines.length / 2);
  const first = await translateLines(lines.slice(0, middle), pair, signal, progress);
  const size = lines.slice(0, middle).join("").length;
  return first + (await translateLines(lines.slice(middle), pair, signal, (share) => progress(size + share)));
}

async function translateOnce(text, pair, signal, progress) {
  let [result, read] = ["", 0];
  for await (const line of translate({ text, pair: pair.name }, signal)) {
    if (line.sentence) {
      result += line.sentence.space + line.sentence.text;
      read += line.sentence.before.length + line.sentence.source.length;
      progress(read);
    }
    if (line.done) result += line.after[0];
  }
  return result;
}

function pause(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    }, { once: true });
  });
}

function showShare(done, total) {
  const share = total ? done / total : 1;
  byId("file-progress").value = share;
  byId("file-status").textContent = `${Math.floor(100 * share)} %`;
}

/** notes.txt becomes notes.en.txt. */
export function nameFor(name, language) {
  const dot = name.lastIndexOf(".");
  return dot > 0 ? `${name.slice(0, dot)}.${language}${name.slice(dot)}` : `${name}.${language}`;
}

export function setUp(take) {
  byId("open").addEventListener("click", () => byId("file").click());
  byId("file").addEventListener("change", () => {
    const [file] = byId("file").files;
    if (file) take(file);
    byId("file").value = "";
  });
  byId("file-stop").addEventListener("click", () => work?.abort());
  const carries = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
  document.addEventListener("dragover", (event) => {
    if (!carries(event)) return;
    event.preventDefault();
    byId("drop").hidden = false;
  });
  document.addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) byId("drop").hidden = true;
  });
  document.addEventListener("drop", (event) => {
    if (!carries(event)) return;
    event.preventDefault();
    byId("drop").hidden = true;
    if (event.dataTransfer.files[0]) take(event.dataTransfer.files[0]);
  });
}

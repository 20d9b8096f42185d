// The report's data: parsed once, weights unpacked sentence by sentence when they are first looked at.

const report = JSON.parse(document.getElementById("report").textContent);
const models = report.models;
const letters = ["A", "B"];
const unpacked = new Map();

/** The weights of every attention over a sentence: name → {heads, rows, columns, values}; values in whole units. */
function sentenceWeights(model, sentence) {
  const key = `${model}/${sentence}`;
  if (!unpacked.has(key)) unpacked.set(key, unpack(models[model].sentences[sentence]));
  return unpacked.get(key);
}

async function unpack(sentence) {
  const packed = Uint8Array.from(atob(sentence.weights), (letter) => letter.charCodeAt(0));
  const inflated = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const all = new Uint16Array(await new Response(inflated).arrayBuffer());
  const byName = new Map();
  let from = 0;
  for (const { name, queries, keys, heads } of sentence.attentions) {
    const rows = sentence.tokens[queries].length;
    const columns = sentence.tokens[keys].length;
    const size = rows * columns;
    const values = Array.from({ length: heads }, (_, head) => all.subarray(from + head * size, from + (head + 1) * size));
    from += heads * size;
    byName.set(name, { heads, rows, columns, values });
  }
  return byName;
}

function attentionOf(model, sentence, name) {
  return models[model].sentences[sentence].attentions.find((each) => each.name === name);
}

/** The group of an attention in a model and its place there, or null where the model has no such attention. */
function placeOf(model, name) {
  for (const group of models[model].groups) {
    const at = group.attentions.indexOf(name);
    if (at >= 0) return { group, layer: group.layers[at] };
  }
  return null;
}

/** An attention in words: encoder self, layer 2. */
function nameInWords(model, name) {
  const place = placeOf(model, name);
  return place ? `${place.group.name}, layer ${place.layer}` : name;
}

/** Measures of an attention by head: of one sentence, or of all where `sentence` is null. */
function measuresOf(model, name, sentence) {
  if (sentence === null) return models[model].measures[name] ?? {};
  return attentionOf(model, sentence, name)?.measures ?? {};
}

function headsOf(model, name) {
  return models[model].sentences[0].attentions.find((each) => each.name === name).heads;
}

const measureNames = [...new Set(models.flatMap((model) => Object.values(model.measures).flatMap(Object.keys)))].sort(
  (one, other) => knownPlace(one) - knownPlace(other),
);

function knownPlace(measure) {
  const at = Object.keys(report.measures).indexOf(measure);
  return at < 0 ? Infinity : at;
}

function measureLabel(measure) {
  return report.measures[measure]?.label ?? measure.replaceAll("_", " ");
}

// ------------------------------------------------------------------ numbers and tokens as a reader likes them

/** A weight to four digits, as exact as it is kept. */
function weightText(units) {
  return (units / report.units).toFixed(String(report.units).length - 1);
}

/** A measure to four figures. */
function numberText(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-4) return value.toExponential(2);
  return value.toFixed(Math.max(0, Math.min(4, 3 - Math.floor(Math.log10(size)))));
}

function capital(words) {
  return words.slice(0, 1).toUpperCase() + words.slice(1);
}

const blanks = { " ": "␣", "\n": "⏎", "\t": "⇥", "": "∅" };

/** A token so that it can be seen: white space by a sign, what is as invisible by its number in Unicode. */
function tokenText(token) {
  if (/[^\s\p{Cc}\p{Cf}]/u.test(token)) return token;
  const number = (letter) => `U+${letter.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
  return [...token].map((letter) => blanks[letter] ?? number(letter)).join("") || blanks[""];
}

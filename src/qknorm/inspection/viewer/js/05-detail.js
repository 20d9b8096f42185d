// The heads in view, one heat map a model, and the words of the sentence above them.

const detail = document.getElementById("detail");
const heatMaps = models.map((_, model) => new HeatMap(model, moveTogether));
let lookedUp = 0;

/** Where both models read the same tokens, their cursors go together. */
function moveTogether(row, column, origin) {
  for (const other of heatMaps) {
    if (other === origin || !other.element.isConnected || !other.values) continue;
    if (other.queries.join("\0") === origin.queries.join("\0") && other.keys.join("\0") === origin.keys.join("\0")) {
      other.move(row, column, { quiet: true });
    }
  }
}

async function showDetail() {
  const turn = ++lookedUp;
  const { sentence, attention, head } = state;
  const inView = modelsInView();
  const weights = await Promise.all(inView.map((model) => sentenceWeights(model, sentence)));
  if (turn !== lookedUp) return;
  detail.classList.toggle("two", inView.length > 1);
  const shown = inView.map((model, at) => {
    const own = weights[at].get(attention);
    return own && head < own.heads ? heatMaps[model].element : missing(model, attention, head);
  });
  detail.replaceChildren(...shown);
  inView.forEach((model, at) => {
    const own = weights[at].get(attention);
    if (own && head < own.heads) heatMaps[model].show(sentence, attention, head, own);
  });
  detail.dataset.shown = `${sentence}/${attention}/${head}/${state.view}/${state.shade}`;
}

function missing(model, attention, head) {
  return make("p", { className: "note" }, `Model ${letters[model]} has no head ${head + 1} in ${attention}.`);
}

function relayDetail() {
  for (const map of heatMaps) {
    if (!map.element.isConnected || !map.values) continue;
    map.layOut();
    map.move(map.row, map.column, { quiet: true });
  }
}

function showTexts() {
  const lines = [];
  const line = (label, text) => {
    lines.push(make("dt", {}, label), make("dd", { dir: "auto" }, text));
  };
  const first = models[0].sentences[state.sentence];
  line(first.translation === null ? "text" : "source", first.text);
  for (const model of modelsInView()) {
    const { translation } = models[model].sentences[state.sentence];
    const label = models.length > 1 ? `${letters[model]} writes` : "translation";
    if (translation !== null) line(label, translation || "(nothing)");
  }
  if (first.reference !== null && first.reference !== first.translation) line("reference", first.reference);
  document.getElementById("texts").replaceChildren(make("dl", {}, ...lines));
}

function setUpSentences() {
  const select = document.getElementById("sentence");
  models[0].sentences.forEach(({ text }, at) => {
    const short = text.length > 90 ? `${text.slice(0, 88)}…` : text;
    select.append(make("option", { value: at, dir: "auto" }, `${at + 1}. ${short}`));
  });
  const last = models[0].sentences.length - 1;
  const buttons = { before: document.getElementById("sentence-before"), after: document.getElementById("sentence-after") };
  const refresh = () => {
    select.value = state.sentence;
    buttons.before.disabled = state.sentence === 0;
    buttons.after.disabled = state.sentence === last;
    showTexts();
  };
  select.addEventListener("change", () => update({ sentence: Number(select.value) }));
  buttons.before.addEventListener("click", () => update({ sentence: Math.max(0, state.sentence - 1) }));
  buttons.after.addEventListener("click", () => update({ sentence: Math.min(last, state.sentence + 1) }));
  listen(["sentence", "view"], refresh);
  refresh();
}

function setUpDetail() {
  listen(["sentence", "attention", "head", "view", "shade"], showDetail);
  let width = 0;
  new ResizeObserver(() => {
    if (detail.clientWidth !== width && width) relayDetail();
    width = detail.clientWidth;
  }).observe(detail);
  return showDetail();
}

// Measures as small multiples, a square a head, one picture a measure; both models share a range of colours.

const multiples = document.getElementById("multiples");
const SQUARE = { most: 20, least: 9, gap: 6, room: 150 };

function showMultiples() {
  multiples.replaceChildren(...measureNames.map(multiple));
}

/** Every head of a model with its value of a measure, groups one after another. */
function headValues(model, measure) {
  return models[model].groups.flatMap((group, at) =>
    group.attentions.flatMap((attention) =>
      (measuresOf(model, attention, sentenceInScope())[measure] ?? []).map((value, head) => ({
        model, attention, head, value, group: at,
      })),
    ),
  );
}

function multiple(measure) {
  const inView = modelsInView();
  const values = inView.map((model) => headValues(model, measure));
  const known = values.flat().map(({ value }) => value).filter((value) => value !== null);
  const low = Math.min(...known);
  const high = Math.max(...known);
  const share = (value) => (high > low ? (value - low) / (high - low) : 0.5);
  const range = make("span", { className: "range" }, known.length ? `${numberText(low)} – ${numberText(high)}` : "no value");
  const pictures = inView.map((model, at) => squares(model, measure, values[at], share, range));
  const caption = make("figcaption", { title: report.measures[measure]?.meaning ?? "" }, make("b", {}, measureLabel(measure)), range);
  return make("figure", { className: "multiple" }, caption, make("div", { className: "pictures" }, ...pictures));
}

/** Lays heads out: a line an attention, a little more room between groups. */
function placeSquares(model, values) {
  const lines = new Map();
  for (const each of values) {
    if (!lines.has(each.attention)) lines.set(each.attention, { at: lines.size, group: each.group });
  }
  const across = Math.max(1, ...values.map(({ head }) => head + 1));
  const size = Math.max(SQUARE.least, Math.min(SQUARE.most, Math.floor(SQUARE.room / across / modelsInView().length)));
  const top = ({ attention }) => lines.get(attention).at * size + lines.get(attention).group * SQUARE.gap;
  const height = lines.size * size + (models[model].groups.length - 1) * SQUARE.gap;
  return { size, width: across * size, height, left: ({ head }) => head * size, top };
}

function squares(model, measure, values, share, range) {
  const canvas = make("canvas", { className: "squares", role: "img" });
  const place = placeSquares(model, values);
  const context = sizedContext(canvas, place.width, place.height);
  for (const each of values) {
    context.fillStyle = each.value === null ? styleValue("--line") : colourOf(share(each.value), "warm");
    context.fillRect(place.left(each), place.top(each), place.size - 1, place.size - 1);
    if (each.attention === state.attention && each.head === state.head) {
      context.strokeStyle = styleValue("--accent");
      context.lineWidth = 2;
      context.strokeRect(place.left(each) + 0.5, place.top(each) + 0.5, place.size - 2, place.size - 2);
    }
  }
  const whose = models.length > 1 ? `model ${letters[model]}, ` : "";
  canvas.setAttribute("aria-label", `${measureLabel(measure)}, ${whose}${range.textContent}; the table below has every value`);
  const usual = range.textContent;
  const find = (event) => {
    const { offsetX: x, offsetY: y } = event;
    const inside = (each) => x >= place.left(each) && x < place.left(each) + place.size && y >= place.top(each) && y < place.top(each) + place.size;
    return values.find(inside);
  };
  canvas.addEventListener("pointermove", (event) => {
    const each = find(event);
    canvas.title = each ? `${nameInWords(model, each.attention)}, head ${each.head + 1}` : "";
    range.textContent = each ? `${placeOf(model, each.attention).layer}.${each.head + 1}: ${numberText(each.value)}` : usual;
    range.classList.toggle("here", Boolean(each));
  });
  canvas.addEventListener("pointerleave", () => {
    range.textContent = usual;
    range.classList.remove("here");
  });
  canvas.addEventListener("click", (event) => {
    const each = find(event);
    if (each) chooseHead(each.attention, each.head);
  });
  return canvas;
}

function setUpMeasures() {
  listen(["view", "scope", "attention", "head"], showMultiples);
  listen(["sentence"], () => state.scope === "one" && showMultiples());
  showMultiples();
}

// Curves over training, as recorded in the run: a panel a quantity; model A in full lines, model B dashed.

const PLOT = { width: 420, height: 220, left: 50, right: 10, top: 10, bottom: 26, inRow: 4 };

function showCurves() {
  const titles = [...new Set(models.flatMap((model) => model.panels.map(({ title }) => title)))];
  const section = document.getElementById("training");
  section.hidden = document.getElementById("to-training").hidden = !titles.length;
  document.getElementById("curves").replaceChildren(...titles.map(panel));
}

function panel(title) {
  const lines = modelsInView().flatMap((model) => {
    const series = models[model].panels.find((each) => each.title === title)?.series ?? [];
    return series.filter(({ steps }) => steps.length).map((each) => ({ ...each, model }));
  });
  const named = [...new Set(lines.map(({ name }) => kindOf(name)))];
  lines.forEach((line) => Object.assign(line, lookOf(line, named, lines)));
  const readout = make("p", { className: "readout small" }, " ");
  const caption = make("figcaption", {}, make("b", {}, title));
  const body = lines.length ? [plot(title, lines, readout), legend(named, lines), readout] : [make("p", { className: "note" }, "nothing recorded")];
  return make("figure", { className: "curve" }, caption, ...body);
}

/** What is left of a name without its numbers: encoder self of encoder.0.self. */
function kindOf(name) {
  return name.split(".").filter((part) => part && !/^\d+$/.test(part)).join(" ") || name;
}

/** Colour by kind, fainter for shallower layers; dashes for the second model. */
function lookOf(line, named, lines) {
  const kind = kindOf(line.name);
  const alike = lines.filter((each) => each.model === line.model && kindOf(each.name) === kind);
  const depth = (alike.indexOf(line) + 1) / alike.length;
  return { kind, colour: `var(--line-${named.indexOf(kind) % 4})`, opacity: 0.35 + 0.65 * depth, dashed: line.model > 0 };
}

function plot(title, lines, readout) {
  const x = axis(lines.flatMap(({ steps }) => steps), PLOT.left, PLOT.width - PLOT.right);
  const y = axis(lines.flatMap(({ values }) => values), PLOT.height - PLOT.bottom, PLOT.top, 0.04);
  const parts = [];
  for (const tick of y.ticks) {
    parts.push(makeSvg("line", { class: "grid", x1: PLOT.left, x2: PLOT.width - PLOT.right, y1: y.at(tick), y2: y.at(tick) }));
    parts.push(label(tickText(tick), PLOT.left - 6, y.at(tick), "end"));
  }
  for (const tick of x.ticks) parts.push(label(tickText(tick), x.at(tick), PLOT.height - PLOT.bottom + 14, "middle"));
  for (const { steps, values, colour, opacity, dashed } of lines) {
    const points = steps.map((step, at) => `${x.at(step).toFixed(1)},${y.at(values[at]).toFixed(1)}`);
    const look = { stroke: colour, "stroke-opacity": opacity, class: dashed ? "series dashed" : "series" };
    parts.push(points.length > 1 ? makeSvg("polyline", { points: points.join(" "), ...look }) : dotAt(points[0], colour));
  }
  const pointer = makeSvg("line", { class: "pointer", y1: PLOT.top, y2: PLOT.height - PLOT.bottom, x1: -9, x2: -9 });
  const spoken = `${title} over training steps: ${lines.map((line) => `${line.name} ends at ${numberText(line.values.at(-1))}`).join(", ")}`;
  const svg = makeSvg("svg", { viewBox: `0 0 ${PLOT.width} ${PLOT.height}`, role: "img", "aria-label": spoken }, ...parts, pointer);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    readAt(x.value(((event.clientX - box.left) / box.width) * PLOT.width), lines, x, pointer, readout);
  });
  svg.addEventListener("pointerleave", () => {
    pointer.setAttribute("x1", -9);
    pointer.setAttribute("x2", -9);
    readout.textContent = " ";
  });
  return svg;
}

function dotAt(point, colour) {
  const [cx, cy] = point.split(",");
  return makeSvg("circle", { cx, cy, r: 3, fill: colour });
}

/** What every curve has at the recorded step nearest to where the pointer is. */
function readAt(step, lines, x, pointer, readout) {
  const nearest = (steps) => steps.reduce((best, each, at) => (Math.abs(each - step) < Math.abs(steps[best] - step) ? at : best), 0);
  const found = lines.map((line) => ({ line, at: nearest(line.steps) }));
  const shown = lines[0].steps[found[0].at];
  for (const end of ["x1", "x2"]) pointer.setAttribute(end, x.at(shown));
  const words = found.map(({ line, at }) => {
    const whose = models.length > 1 ? `${letters[line.model]} ` : "";
    return `${whose}${line.name} ${numberText(line.values[at])}`;
  });
  readout.textContent = `step ${shown.toLocaleString("en")}: ${words.join(" · ")}`;
}

/** A linear axis over values between two places, with a handful of round ticks, and some of its span as a margin. */
function axis(values, from, to, margin = 0) {
  let low = Math.min(...values);
  let high = Math.max(...values);
  if (low === high) [low, high] = [low - (Math.abs(low) || 1) * 0.1, high + (Math.abs(high) || 1) * 0.1];
  [low, high] = [low - margin * (high - low), high + margin * (high - low)];
  const at = (value) => from + ((value - low) / (high - low)) * (to - from);
  const rough = (high - low) / PLOT.inRow;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const ticks = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-9; tick += step) ticks.push(Number(tick.toPrecision(12)));
  return { at, ticks, value: (place) => low + ((place - from) / (to - from)) * (high - low) };
}

function tickText(tick) {
  const size = Math.abs(tick);
  if (size && (size < 1e-3 || size >= 1e6)) return tick.toExponential(0);
  return size >= 1000 ? tick.toLocaleString("en") : String(tick);
}

function label(text, x, y, anchor) {
  const element = makeSvg("text", { x, y, "text-anchor": anchor, "dominant-baseline": "middle", class: "tick" });
  element.textContent = text;
  return element;
}

function legend(named, lines) {
  const entries = named.map((kind, at) => {
    const several = lines.filter((line) => line.kind === kind && line.model === lines[0].model).length > 1;
    const swatch = make("i", { className: "swatch", "aria-hidden": "true" });
    swatch.style.backgroundColor = `var(--line-${at % 4})`;
    return make("li", {}, swatch, several ? `${kind} (deeper is stronger)` : kind);
  });
  if (lines.some(({ dashed }) => dashed) && modelsInView().length > 1) entries.push(make("li", { className: "dashes" }, "A full, B dashed"));
  return make("ul", { className: "legend small" }, ...entries);
}

function setUpCurves() {
  listen(["view"], showCurves);
  showCurves();
}

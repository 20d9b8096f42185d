// Every head with every measure, sorted by any column.

const table = document.getElementById("table");
const sorting = { column: null, falling: true };

/** The columns: what stands in them, how it is shown, and by what it is sorted. */
function columnsOfTable() {
  const words = [
    ...(models.length > 1 ? [{ key: "model", label: "model", text: (line) => letters[line.model], by: (line) => line.model }] : []),
    { key: "attention", label: "attention", text: (line) => nameInWords(line.model, line.attention), by: (line) => line.place },
    { key: "head", label: "head", text: (line) => String(line.head + 1), by: (line) => line.head },
    { key: "role", label: "looks at", text: (line) => line.role, by: (line) => line.role },
  ];
  const numbers = measureNames.map((measure) => ({
    key: measure,
    label: measureLabel(measure),
    meaning: report.measures[measure]?.meaning,
    number: true,
    text: (line) => numberText(line.measures[measure]),
    by: (line) => line.measures[measure] ?? null,
  }));
  return [...words, ...numbers];
}

function linesOfTable() {
  return modelsInView().flatMap((model) => {
    const names = models[model].groups.flatMap((group) => group.attentions);
    return names.flatMap((attention, place) => {
      const measures = measuresOf(model, attention, sentenceInScope());
      return models[model].roles[attention].map((role, head) => ({
        model, attention, place, head, role,
        measures: Object.fromEntries(Object.entries(measures).map(([name, values]) => [name, values[head]])),
      }));
    });
  });
}

/** Missing values stay last, whichever way the rest is sorted. */
function compare(one, other, { by }, falling) {
  const [a, b] = [by(one), by(other)];
  if (a === null || b === null) return (a === null) - (b === null);
  const order = a < b ? -1 : a > b ? 1 : 0;
  return falling ? -order : order;
}

function showTable() {
  const columns = columnsOfTable();
  const lines = linesOfTable();
  const column = columns.find(({ key }) => key === sorting.column);
  if (column) lines.sort((one, other) => compare(one, other, column, sorting.falling));
  const head = make("tr", {}, ...columns.map(headOfColumn));
  const body = lines.map((line) => {
    const cells = columns.map((each) => make("td", { className: each.number ? "number" : each.key }, cellOf(each, line)));
    return make("tr", { "data-attention": line.attention, "data-head": line.head }, ...cells);
  });
  const over = state.scope === "one" ? `sentence ${state.sentence + 1}` : "all sentences";
  const caption = make("caption", { className: "hidden" }, `Measures of every head over ${over}`);
  const focused = document.activeElement?.dataset?.sort;
  table.replaceChildren(caption, make("thead", {}, head), make("tbody", {}, ...body));
  markLine();
  if (focused) table.querySelector(`[data-sort="${CSS.escape(focused)}"]`)?.focus();
}

/** Marks the chosen head. */
function markLine() {
  for (const { dataset, classList } of table.tBodies[0].rows) {
    classList.toggle("chosen", dataset.attention === state.attention && Number(dataset.head) === state.head);
  }
}

function headOfColumn({ key, label, meaning, number }) {
  const active = sorting.column === key;
  const arrow = make("span", { className: "arrow", "aria-hidden": "true" }, active ? (sorting.falling ? "▾" : "▴") : "");
  const button = make("button", { type: "button", title: meaning ?? "", "data-sort": key }, label, arrow);
  button.addEventListener("click", () => {
    // numbers are of interest from the largest down, words from the first up
    sorting.falling = active ? !sorting.falling : Boolean(number);
    sorting.column = key;
    showTable();
  });
  const sorted = active ? (sorting.falling ? "descending" : "ascending") : "none";
  return make("th", { scope: "col", className: number ? "number" : key, "aria-sort": sorted }, button);
}

function cellOf(column, line) {
  if (column.key === "role") return make("span", { className: "role", title: roleWords[line.role] }, roleMark(line.role), line.role);
  if (column.key !== "attention") return column.text(line);
  const button = make("button", { type: "button", className: "link" }, column.text(line));
  button.setAttribute("aria-label", `Show ${column.text(line)}, head ${line.head + 1}`);
  button.addEventListener("click", () => {
    chooseHead(line.attention, line.head);
    document.getElementById("heads").scrollIntoView({ block: "start" });
  });
  return button;
}

function setUpTable() {
  listen(["view", "scope"], showTable);
  listen(["attention", "head"], markLine);
  listen(["sentence"], () => state.scope === "one" && showTable());
  showTable();
}

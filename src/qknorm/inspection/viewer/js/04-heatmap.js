// One head over one sentence: cells with tokens around them, a cursor for pointer and keys, and its value in words.

const CELL = { least: 13, most: 40, numbersFrom: 30 };

class HeatMap {
  /** `onMove(row, column)` is told where the cursor goes. */
  constructor(model, onMove) {
    this.model = model;
    this.onMove = onMove;
    this.row = this.column = 0;
    this.paint = make("canvas");
    this.marks = make("canvas", { className: "marks" });
    this.cells = make(
      "div",
      { className: "cells", tabIndex: 0, role: "application", "aria-roledescription": "heat map" },
      this.paint,
      this.marks,
    );
    this.columnLabels = make("div", { className: "columns", "aria-hidden": "true" });
    this.rowLabels = make("div", { className: "rows", "aria-hidden": "true" });
    this.grid = make("div", { className: "heat-grid" }, make("span"), this.columnLabels, this.rowLabels, this.cells);
    this.axes = make("p", { className: "axes" });
    this.readout = make("p", { className: "readout" });
    this.reading = make("div", { className: "reading" });
    this.caption = make("figcaption");
    this.table = make("details", { className: "as-table" }, make("summary", {}, "These weights as a table"));
    this.scroll = make("div", { className: "heat-scroll" }, this.grid);
    this.element = make(
      "figure",
      { className: "heat" },
      this.caption,
      this.readout,
      this.scroll,
      this.axes,
      this.reading,
      this.table,
    );
    this.cells.addEventListener("pointermove", (event) => this.point(event));
    this.cells.addEventListener("pointerdown", (event) => this.point(event));
    this.cells.addEventListener("keydown", (event) => this.key(event));
    this.table.addEventListener("toggle", () => this.fillTable());
  }

  /** Shows a head; `weights` as sentenceWeights gives them. */
  show(sentence, attention, head, weights) {
    const { tokens, directions } = models[this.model].sentences[sentence];
    const { queries, keys } = attentionOf(this.model, sentence, attention);
    Object.assign(this, { rows: weights.rows, columns: weights.columns, values: weights.values[head] });
    this.queries = tokens[queries].map(tokenText);
    this.keys = tokens[keys].map(tokenText);
    this.mirrored = directions[keys] === "rtl";
    this.grid.dir = directions[keys];
    this.directions = { queries: directions[queries], keys: directions[keys] };
    this.row = Math.min(this.row, this.rows - 1);
    this.column = Math.min(this.column, this.columns - 1);
    this.showWords(sentence, attention, head, queries, keys);
    this.layOut();
    this.fillReading();
    this.fillTable();
    this.move(this.row, this.column, { quiet: true });
  }

  showWords(sentence, attention, head, queries, keys) {
    const model = models[this.model];
    const role = model.roles[attention]?.[head] ?? "mixed";
    const name = capital(`${nameInWords(this.model, attention)}, head ${head + 1}`);
    this.name = models.length > 1 ? `${letters[this.model]}: ${name}` : name;
    const badge = models.length > 1 ? [make("b", { className: "badge" }, letters[this.model])] : [];
    const mark = make("span", { className: "role", title: roleWords[role] }, roleMark(role), role);
    this.caption.replaceChildren(...badge, make("span", {}, name), mark);
    const sides = make("span", {}, "rows: ", make("b", {}, queries), " · columns: ", make("b", {}, keys));
    this.axes.replaceChildren(sides, make("span", { className: "ramp" }, "0", make("i"), state.shade === "root" ? "1, by root" : "1"));
    const size = `${this.rows} rows (${queries}) by ${this.columns} columns (${keys})`;
    this.cells.setAttribute("aria-label", `${this.name}: ${size}. Arrow keys move, Home and End go to the ends.`);
  }

  // ---------------------------------------------------------------- layout and paint

  layOut() {
    const room = this.scroll.clientWidth - Math.min(150, 16 + 7.5 * Math.max(...this.queries.map((token) => token.length)));
    const fits = Math.floor(room / this.columns);
    this.cell = Math.max(CELL.least, Math.min(CELL.most, fits, Math.floor(680 / this.rows) || CELL.least));
    this.grid.style.setProperty("--cell", `${this.cell}px`);
    this.grid.style.setProperty("--label", `${Math.max(9.5, Math.min(13, this.cell * 0.85))}px`);
    const label = (token, at) => make("span", { dir: "auto", title: token, "data-at": at }, token);
    this.columnLabels.replaceChildren(...this.keys.map(label));
    this.rowLabels.replaceChildren(...this.queries.map(label));
    this.paintCells();
  }

  paintCells() {
    const { cell, rows, columns } = this;
    const context = sizedContext(this.paint, columns * cell, rows * cell);
    const gap = cell >= 10 ? 1 : 0;
    context.font = `${Math.min(12, cell * 0.36)}px system-ui, sans-serif`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    for (let row = 0; row < rows; row++) {
      for (let column = 0; column < columns; column++) {
        const units = this.values[row * columns + column];
        const shade = shadeOf(units);
        const x = this.left(column);
        context.fillStyle = colourOf(shade);
        context.fillRect(x, row * cell, cell - gap, cell - gap);
        if (cell >= CELL.numbersFrom && units >= 0.05 * report.units) {
          context.fillStyle = wantsLight(shade) ? "#fff" : "#111";
          context.fillText(Math.round((100 * units) / report.units), x + (cell - gap) / 2, row * cell + (cell - gap) / 2);
        }
      }
    }
    sizedContext(this.marks, columns * cell, rows * cell);
  }

  left(column) {
    return (this.mirrored ? this.columns - 1 - column : column) * this.cell;
  }

  // ---------------------------------------------------------------- the cursor

  point(event) {
    const box = this.cells.getBoundingClientRect();
    const across = Math.floor((event.clientX - box.left) / this.cell);
    const row = Math.floor((event.clientY - box.top) / this.cell);
    const column = this.mirrored ? this.columns - 1 - across : across;
    if (row < 0 || row >= this.rows || column < 0 || column >= this.columns) return;
    this.move(row, column);
  }

  key(event) {
    const ahead = this.mirrored ? -1 : 1;
    const moves = {
      ArrowUp: [this.row - 1, this.column],
      ArrowDown: [this.row + 1, this.column],
      ArrowLeft: [this.row, this.column - ahead],
      ArrowRight: [this.row, this.column + ahead],
      Home: event.ctrlKey ? [0, 0] : [this.row, 0],
      End: event.ctrlKey ? [this.rows - 1, this.columns - 1] : [this.row, this.columns - 1],
      PageUp: [0, this.column],
      PageDown: [this.rows - 1, this.column],
    };
    if (!(event.key in moves) || event.altKey || event.metaKey) return;
    event.preventDefault();
    const [row, column] = moves[event.key];
    this.move(Math.max(0, Math.min(this.rows - 1, row)), Math.max(0, Math.min(this.columns - 1, column)), { aloud: true });
  }

  /** Puts the cursor on a cell; `aloud` for screen readers, `quiet` without telling who listens. */
  move(row, column, { aloud = false, quiet = false } = {}) {
    this.row = row;
    this.column = column;
    this.drawCursor();
    this.showValue();
    this.shadeReading();
    if (aloud) this.say();
    if (!quiet) this.onMove(row, column, this);
  }

  drawCursor() {
    const { cell, row, column } = this;
    const context = sizedContext(this.marks, this.columns * cell, this.rows * cell);
    context.strokeStyle = styleValue("--accent");
    // hairlines, not a tint: the colours of the cells stay what they are
    context.globalAlpha = 0.45;
    context.strokeRect(0.5, row * cell - 0.5, this.columns * cell - 1, cell);
    context.strokeRect(this.left(column) - 0.5, 0.5, cell, this.rows * cell - 1);
    context.globalAlpha = 1;
    context.lineWidth = 2;
    context.strokeRect(this.left(column) + 0.5, row * cell + 0.5, cell - 2, cell - 2);
    for (const [labels, at] of [[this.columnLabels, column], [this.rowLabels, row]]) {
      labels.querySelector(".here")?.classList.remove("here");
      labels.children[at]?.classList.add("here");
    }
  }

  unitsAt(row, column) {
    return this.values[row * this.columns + column];
  }

  showValue() {
    const { row, column } = this;
    const value = make("output", {}, weightText(this.unitsAt(row, column)));
    value.dataset.row = row;
    value.dataset.column = column;
    this.readout.replaceChildren(
      make("bdi", {}, this.queries[row]),
      make("span", { className: "to", "aria-label": "looks at" }, "→"),
      make("bdi", {}, this.keys[column]),
      value,
    );
  }

  say() {
    const { row, column } = this;
    const value = weightText(this.unitsAt(row, column));
    document.getElementById("spoken").textContent =
      `${this.queries[row]}, row ${row + 1}; ${this.keys[column]}, column ${column + 1}: ${value}`;
  }

  // ---------------------------------------------------------------- the same as running text, and as a table

  /** Two lines of text: choose a word in the first, and the second is shaded by where it looks. */
  fillReading() {
    const choose = (row) => () => this.move(row, this.strongest(row));
    this.queryWords = this.queries.map((token, row) =>
      make("span", { className: "word", dir: "auto", onpointerenter: choose(row), onpointerdown: choose(row) }, token),
    );
    this.keyWords = this.keys.map((token) => make("span", { className: "word key", dir: "auto" }, token));
    this.reading.replaceChildren(
      make("p", { dir: this.directions.queries, title: "Point at a token to see where it looks" }, ...this.queryWords),
      make("p", { dir: this.directions.keys }, ...this.keyWords),
    );
  }

  strongest(row) {
    const line = this.values.subarray(row * this.columns, (row + 1) * this.columns);
    return line.indexOf(Math.max(...line));
  }

  shadeReading() {
    this.queryWords.forEach((word, row) => word.classList.toggle("here", row === this.row));
    this.keyWords.forEach((word, column) => {
      const shade = shadeOf(this.unitsAt(this.row, column));
      word.style.backgroundColor = colourOf(shade);
      word.style.color = wantsLight(shade) ? "#fff" : "#111";
    });
  }

  fillTable() {
    this.table.querySelector(".table-scroll")?.remove();
    if (!this.table.open) return;
    const head = this.keys.map((token) => make("th", { scope: "col", dir: "auto" }, token));
    const lines = this.queries.map((token, row) => {
      const cells = this.keys.map((_, column) => make("td", {}, weightText(this.unitsAt(row, column))));
      return make("tr", {}, make("th", { scope: "row", dir: "auto" }, token), ...cells);
    });
    const table = make(
      "table",
      { dir: this.directions.keys },
      make("caption", { className: "hidden" }, this.name),
      make("thead", {}, make("tr", {}, make("td"), ...head)),
      make("tbody", {}, ...lines),
    );
    const region = { className: "table-scroll", tabIndex: 0, role: "region", "aria-label": `Weights of ${this.name}` };
    this.table.append(make("div", region, table));
  }
}

// All heads of the models in view as small pictures, a row a layer; arrow keys walk, Enter or a click chooses.

const overview = document.getElementById("overview");
let overviewTurn = 0;

async function showOverview() {
  const turn = ++overviewTurn;
  const inView = modelsInView();
  const weights = await Promise.all(inView.map((model) => sentenceWeights(model, state.sentence)));
  if (turn !== overviewTurn) return;
  const hadFocus = overview.contains(document.activeElement);
  overview.replaceChildren(...inView.map((model, at) => modelOverview(model, weights[at])));
  markChosen();
  if (hadFocus) overview.querySelector("[tabindex='0']")?.focus();
}

function modelOverview(model, weights) {
  const parts = models[model].groups.map((group, at) => groupOverview(model, group, weights, at === 0));
  const badge = make("h3", { className: "model-name" }, make("b", { className: "badge" }, letters[model]), models[model].name);
  return make("div", { className: "model-overview" }, ...(models.length > 1 ? [badge] : []), ...parts);
}

function groupOverview(model, group, weights, isFirst) {
  const heads = headsOf(model, group.attentions[0]);
  const lines = group.attentions.map((attention, at) => {
    const header = make("span", { role: "rowheader", className: "layer" }, String(group.layers[at]));
    header.setAttribute("aria-label", `layer ${group.layers[at]}`);
    const thumbs = Array.from({ length: heads }, (_, head) => thumbnail(model, attention, head, weights.get(attention)));
    return make("div", { role: "row" }, header, ...thumbs);
  });
  const numbers = Array.from({ length: heads }, (_, head) => make("span", {}, String(head + 1)));
  const grid = make("div", { role: "grid", className: "thumbs", "aria-label": group.name }, ...lines);
  grid.style.setProperty("--heads", heads);
  grid.addEventListener("keydown", walk);
  const title = make("h4", {}, capital(group.name), make("small", {}, isFirst ? "layers down, heads across" : ""));
  const header = make("div", { className: "head-numbers", "aria-hidden": "true" }, make("span"), ...numbers);
  header.style.setProperty("--heads", heads);
  return make("section", { className: "group" }, title, header, grid);
}

function thumbnail(model, attention, head, weights) {
  const { keys } = attentionOf(model, state.sentence, attention);
  const canvas = make("canvas", { "aria-hidden": "true" });
  const mirrored = models[model].sentences[state.sentence].directions[keys] === "rtl";
  paintPixels(canvas, weights.values[head], weights.rows, weights.columns, mirrored);
  const role = models[model].roles[attention][head];
  const button = make("button", { type: "button", role: "gridcell", tabIndex: -1, className: "thumb" }, canvas, roleMark(role));
  button.title = `${nameInWords(model, attention)}, head ${head + 1}: ${role}`;
  button.setAttribute("aria-label", button.title);
  Object.assign(button.dataset, { model, attention, head });
  button.addEventListener("click", () => chooseHead(attention, head));
  return button;
}

/** Marks the chosen head, and leaves one thumbnail of every grid in the order of the Tab key. */
function markChosen() {
  for (const grid of overview.querySelectorAll("[role=grid]")) {
    let chosen = null;
    for (const button of grid.querySelectorAll("button")) {
      const same = button.dataset.attention === state.attention && Number(button.dataset.head) === state.head;
      button.setAttribute("aria-selected", same);
      button.tabIndex = -1;
      chosen = same ? button : chosen;
    }
    const reached = chosen ?? grid.querySelector("button");
    if (reached) reached.tabIndex = 0;
  }
}

function walk(event) {
  const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  if (!(event.key in steps) || event.target.tagName !== "BUTTON") return;
  event.preventDefault();
  const lines = [...event.currentTarget.children].map((line) => [...line.querySelectorAll("button")]);
  const row = lines.findIndex((line) => line.includes(event.target));
  const [down, across] = steps[event.key];
  const next = lines[row + down]?.[lines[row].indexOf(event.target) + across];
  if (!next) return;
  event.target.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

function setUpOverview() {
  listen(["sentence", "view", "shade"], showOverview);
  listen(["attention", "head"], markChosen);
  return showOverview();
}

// Puts the page together: theme, words of the header, sections.

function effectiveTheme() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}

function showTheme() {
  document.getElementById("theme").setAttribute("aria-pressed", effectiveTheme() === "dark");
  readRamps();
  redrawAll();
}

function setUpTheme() {
  document.getElementById("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = effectiveTheme() === "dark" ? "light" : "dark";
    showTheme();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showTheme);
  document.getElementById("theme").setAttribute("aria-pressed", effectiveTheme() === "dark");
  readRamps();
}

function showHeader() {
  const parts = models.map(({ name, facts }, model) => {
    const badge = models.length > 1 ? [make("b", { className: "badge" }, letters[model])] : [];
    const words = Object.entries(facts).map(([what, fact]) => make("span", { title: what }, fact));
    return make("span", { className: "model-facts" }, ...badge, make("b", {}, name), ...words);
  });
  document.getElementById("models").replaceChildren(...parts);
  const notes = document.getElementById("notes");
  notes.replaceChildren(...report.notes.map((note) => make("li", {}, note)));
  notes.hidden = !report.notes.length;
}

async function setUp() {
  readAddress();
  setUpTheme();
  showHeader();
  const view = document.getElementById("view");
  view.hidden = models.length < 2;
  const names = Object.fromEntries(models.map(({ name }, model) => [letters[model], `${letters[model]} ${name}`]));
  makeChoice(view, "view", { ...names, both: "both" });
  makeChoice(document.getElementById("shade"), "shade", { weight: "weight", root: "√ weight" });
  makeChoice(document.getElementById("scope"), "scope", { all: "all sentences", one: "this sentence" });
  if (state.attention === null) return;
  setUpSentences();
  await Promise.all([setUpOverview(), setUpDetail()]);
  setUpMeasures();
  setUpTable();
  setUpMaps();
  setUpCurves();
}

setUp().then(
  () => { document.documentElement.dataset.ready = "yes"; },
  (error) => {
    const words = typeof DecompressionStream === "undefined" ? "this browser is too old to unpack the weights" : error.message;
    document.querySelector("main").prepend(make("p", { className: "note", role: "alert" }, `The report cannot be shown: ${words}.`));
    throw error;
  },
);

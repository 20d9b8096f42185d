// What is being looked at. Sections listen for the parts they show; the address keeps it, so that a view can be shared.

const firstGroup = models[0].groups.at(-1);

const state = {
  sentence: 0,
  attention: firstGroup?.attentions.at(-1) ?? null,
  head: 0,
  view: models.length > 1 ? "both" : "A",
  shade: "weight",
  scope: "all",
};

const choices = {
  view: models.length > 1 ? ["A", "B", "both"] : ["A"],
  shade: ["weight", "root"],
  scope: ["all", "one"],
};

const listeners = [];

/** Calls `refresh` whenever one of these parts of the state changes. */
function listen(parts, refresh) {
  listeners.push({ parts, refresh });
}

function update(changes) {
  const changed = Object.keys(changes).filter((part) => state[part] !== changes[part]);
  if (!changed.length) return;
  Object.assign(state, changes);
  writeAddress();
  for (const { parts, refresh } of listeners) {
    if (parts.some((part) => changed.includes(part))) refresh();
  }
}

/** Has everything drawn anew, as after a change of theme. */
function redrawAll() {
  for (const { refresh } of listeners) refresh();
}

/** The numbers of the models in view. */
function modelsInView() {
  if (state.view === "both") return models.map((_, model) => model);
  return [letters.indexOf(state.view)];
}

function sentenceInScope() {
  return state.scope === "one" ? state.sentence : null;
}

function chooseHead(attention, head) {
  update({ attention, head });
}

function writeAddress() {
  const { sentence, attention, head, view } = state;
  const words = new URLSearchParams({ sentence: sentence + 1, attention, head: head + 1, view });
  try {
    history.replaceState(null, "", `#${words}`);
  } catch {
    // some viewers of local files forbid it; nothing but the address is lost
  }
}

/** Takes up what the address says, as far as it makes sense here. */
function readAddress() {
  const words = new URLSearchParams(location.hash.slice(1));
  const sentence = Number(words.get("sentence")) - 1;
  if (models[0].sentences[sentence]) state.sentence = sentence;
  if (choices.view.includes(words.get("view"))) state.view = words.get("view");
  const attention = words.get("attention");
  const owner = models.findIndex((_, model) => placeOf(model, attention));
  if (owner < 0) return;
  state.attention = attention;
  const head = Number(words.get("head")) - 1;
  if (Number.isInteger(head) && head >= 0 && head < headsOf(owner, attention)) state.head = head;
}

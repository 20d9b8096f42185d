// A map of the heads of each group: near each other where they attend alike.

const MAP = { width: 300, height: 230, edge: 24, dot: 10, filled: 0.4, readable: 7 };

/** The radius at which so many dots, side by side, fill no more than a part of the picture. */
function dotSize(count) {
  return Math.min(MAP.dot, Math.sqrt((MAP.filled * MAP.width * MAP.height) / count) / 2);
}

function showMaps() {
  const rows = modelsInView().map((model) => {
    const groups = models[model].groups.filter((group) => group.map.length > 1);
    return make("div", { className: "maps" }, ...groups.map((group) => mapOf(model, group)));
  });
  document.getElementById("maps").replaceChildren(...rows);
}

function mapOf(model, group) {
  const heads = group.attentions.flatMap((attention, at) =>
    models[model].roles[attention].map((role, head) => ({ attention, head, role, label: `${group.layers[at]}.${head + 1}` })),
  );
  const size = dotSize(heads.length);
  const places = moveApart(group.map.map(fitPoints(group.map)), size);
  // the chosen head is drawn last, over its neighbours
  const order = heads.map((_, at) => at).sort((one, other) => isChosen(heads[one]) - isChosen(heads[other]));
  const dots = order.map((at) => dot(heads[at], size, ...places[at]));
  const summary = `Map of the ${heads.length} heads of ${group.name}`;
  const svg = makeSvg("svg", { viewBox: `0 0 ${MAP.width} ${MAP.height}`, role: "img", "aria-label": summary }, ...dots);
  const badge = models.length > 1 ? [make("b", { className: "badge" }, letters[model])] : [];
  return make("figure", { className: "map" }, make("figcaption", {}, ...badge, capital(group.name)), svg);
}

function isChosen({ attention, head }) {
  return attention === state.attention && head === state.head;
}

/** Points to places in the picture: one scale for both directions, so that distances stay true. */
function fitPoints(points) {
  const [xs, ys] = [points.map(([x]) => x), points.map(([, y]) => y)];
  const span = ([least, most]) => most - least || 1e-9;
  const [wide, high] = [[Math.min(...xs), Math.max(...xs)], [Math.min(...ys), Math.max(...ys)]];
  const scale = Math.min((MAP.width - 2 * MAP.edge) / span(wide), (MAP.height - 2 * MAP.edge) / span(high));
  const middle = ([least, most]) => (least + most) / 2;
  const bounded = Math.min(scale, 1e6);
  return ([x, y]) => [MAP.width / 2 + bounded * (x - middle(wide)), MAP.height / 2 - bounded * (y - middle(high))];
}

/** Moves dots that would hide each other apart, just as far as they need. */
function moveApart(places, size) {
  const moved = places.map((place) => [...place]);
  const room = 2 * size + 1;
  for (let round = 0; round < 60; round++) {
    for (let one = 0; one < moved.length; one++) {
      for (let other = one + 1; other < moved.length; other++) {
        const [dx, dy] = [moved[other][0] - moved[one][0], moved[other][1] - moved[one][1]];
        const distance = Math.hypot(dx, dy);
        if (distance >= room) continue;
        // dots at the very same place part along a line of their own
        const [x, y] = distance > 1e-6 ? [dx / distance, dy / distance] : [Math.cos(other), Math.sin(other)];
        const push = (room - distance) / 2;
        moved[one] = inside(moved[one][0] - push * x, moved[one][1] - push * y);
        moved[other] = inside(moved[other][0] + push * x, moved[other][1] + push * y);
      }
    }
  }
  return moved;
}

function inside(x, y) {
  const clamp = (value, most) => Math.max(MAP.dot + 3, Math.min(most - MAP.dot - 3, value));
  return [clamp(x, MAP.width), clamp(y, MAP.height)];
}

function dot(head, size, x, y) {
  const chosen = isChosen(head);
  const text = makeSvg("text", { "text-anchor": "middle", "dominant-baseline": "central" });
  text.textContent = size < MAP.readable ? "" : head.label; // the title has it in any case
  const title = makeSvg("title");
  title.textContent = `head ${head.label}: ${head.role}`;
  const circle = makeSvg("circle", { r: size.toFixed(1), class: `role-${head.role}` });
  const choose = () => chooseHead(head.attention, head.head);
  return makeSvg(
    "g",
    { transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})`, class: chosen ? "dot chosen" : "dot", onclick: choose },
    title,
    circle,
    text,
  );
}

function setUpMaps() {
  const entries = Object.entries(roleWords).map(([role, words]) =>
    make("li", {}, roleMark(role), make("b", {}, role), ` ${words}`),
  );
  document.getElementById("roles").replaceChildren(...entries);
  listen(["view", "attention", "head"], showMaps);
  showMaps();
}

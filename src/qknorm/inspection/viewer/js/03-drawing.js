// Elements and colours: everything that more than one section draws with.

/** An element with properties, attributes (those with a dash, role, for and for) and children; text is always text. */
function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role" || name === "for") element.setAttribute(name, value);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

function makeSvg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** Radio buttons that look like one bar, tied to a part of the state. */
function makeChoice(fieldset, part, labels) {
  const bar = fieldset.querySelector("div");
  for (const value of choices[part]) {
    const radio = make("input", { type: "radio", name: part, value, checked: state[part] === value });
    radio.addEventListener("change", () => update({ [part]: value }));
    bar.append(make("label", { className: "choice" }, radio, make("span", {}, labels[value])));
  }
  listen([part], () => {
    for (const radio of bar.querySelectorAll("input")) radio.checked = radio.value === state[part];
  });
}

// ------------------------------------------------------------------ colours, which the style sheet owns

const STEPS = 256;
let ramps = {};

function styleValue(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function readRamps() {
  ramps = {};
  for (const name of ["cool", "warm"]) {
    const stops = [0, 1, 2, 3, 4].map((stop) => parseColour(styleValue(`--${name}-${stop}`)));
    const colours = Array.from({ length: STEPS }, (_, step) => mix(stops, step / (STEPS - 1)));
    ramps[name] = { colours, words: colours.map(([r, g, b]) => `rgb(${r} ${g} ${b})`) };
  }
}

function parseColour(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

/** The colour at a share of the way along evenly spaced stops. */
function mix(stops, share) {
  const place = share * (stops.length - 1);
  const left = Math.min(Math.floor(place), stops.length - 2);
  return stops[left].map((from, channel) => Math.round(from + (place - left) * (stops[left + 1][channel] - from)));
}

function stepOf(share) {
  return Math.max(0, Math.min(STEPS - 1, Math.round(share * (STEPS - 1))));
}

/** How strongly a weight is shaded, 0 to 1: as it is, or by its root, which shows small weights too. */
function shadeOf(units) {
  const share = units / report.units;
  return state.shade === "root" ? Math.sqrt(share) : share;
}

function colourOf(share, ramp = "cool") {
  return ramps[ramp].words[stepOf(share)];
}

/** Whether light letters are read better than dark ones on a colour of the ramp. */
function wantsLight(share, ramp = "cool") {
  const [r, g, b] = ramps[ramp].colours[stepOf(share)];
  return 0.299 * r + 0.587 * g + 0.114 * b < 140;
}

/** Paints weights a pixel a cell; `mirrored` puts the first key at the right, where its text begins. */
function paintPixels(canvas, values, rows, columns, mirrored) {
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext("2d");
  const image = context.createImageData(columns, rows);
  for (let cell = 0; cell < values.length; cell++) {
    const column = cell % columns;
    const pixel = 4 * (mirrored ? cell - column + columns - 1 - column : cell);
    const colour = ramps.cool.colours[stepOf(shadeOf(values[cell]))];
    image.data.set(colour, pixel);
    image.data[pixel + 3] = 255;
  }
  context.putImageData(image, 0, 0);
}

/** Sizes a canvas for the screen's pixels and returns a context whose unit is a pixel of the page. */
function sizedContext(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

/** A small mark for what a head does. */
function roleMark(role) {
  return make("i", { className: `mark role-${role}`, "aria-hidden": "true" });
}

const roleWords = report.roles;

// Small things that every part of the page uses.

export const byId = (id) => document.getElementById(id);

/** An element with properties, attributes (those with a dash, and role) and children; text is always text. */
export function make(name, properties = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key.includes("-") || key === "role") element.setAttribute(key, value);
    else element[key] = value;
  }
  element.append(...children);
  return element;
}

export function showProblem(words) {
  byId("problem").textContent = words ?? "";
  byId("problem").hidden = !words;
}

export const counted = (number, what) => `${number.toLocaleString()} ${what}${number === 1 ? "" : "s"}`;

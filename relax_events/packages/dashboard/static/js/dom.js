// Builds elements. Texts become text nodes only: nothing that a log holds is ever read as HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// Replaces what an element holds, and gives the focus back to the element with the same data-focus.
export function replace(root, ...children) {
  const held = document.activeElement?.dataset?.focus;
  const inside = held && root.contains(document.activeElement);
  root.replaceChildren(...children.flat(3).filter(Boolean));
  if (inside) root.querySelector(`[data-focus="${CSS.escape(held)}"]`)?.focus({ preventScroll: true });
}

// What a view shows stands in the address, so that any view can be shared: in its query, or behind the
// # of a snapshot, since a browser lets no file change its query.

import { snapshot } from "./snapshot.js";

const KEPT = ["run", "lang", "theme", "compare"];

export function place() {
  return snapshot ? location.hash.slice(1) : location.search;
}

export function query() {
  return Object.fromEntries(new URLSearchParams(place().slice(1)));
}

export function address(changes, { keep = KEPT } = {}) {
  const now = query();
  const next = keep === true ? { ...now } : Object.fromEntries(keep.filter((name) => now[name]).map((name) => [name, now[name]]));
  for (const [name, value] of Object.entries(changes)) {
    if (value === "" || value === null || value === undefined) delete next[name];
    else next[name] = value;
  }
  return `${snapshot ? "#" : "/"}?${new URLSearchParams(next)}`;
}

export function go(changes, options) {
  history.pushState(null, "", address(changes, options));
  dispatchEvent(new Event("moved"));
}

export function remember(name, value) {
  try {
    if (value === undefined) return localStorage.getItem(`relax.${name}`);
    localStorage.setItem(`relax.${name}`, value);
  } catch {
    return null;
  }
  return value;
}
